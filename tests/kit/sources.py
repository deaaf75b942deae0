"""The sources of the package, parsed once, and rules that each of them must obey."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import elasticstate._native

PACKAGE = Path(elasticstate._native.__file__).parent
ROOT = PACKAGE.parent
SOURCES = tuple(sorted(PACKAGE.rglob("*.py")))

Rule = Callable[[Path], None]


@functools.cache
def text_of(source: Path) -> str:
    return source.read_text(encoding="utf-8")


@functools.cache
def tree_of(source: Path) -> ast.Module:
    return ast.parse(text_of(source))


def of_each(sources: Sequence[Path] = SOURCES) -> Callable[[Rule], Callable[[], None]]:
    """Make a rule for one source the test that all ``sources`` obey it. It lists all that do not.

    One test for each rule and source would take longer than all that they do.
    """

    def decorate(rule: Rule) -> Callable[[], None]:
        def test() -> None:
            broken = list(filter(None, (_fault(rule, source) for source in sources)))
            assert not broken, "\n".join(broken)

        test.__doc__ = rule.__doc__
        return test

    return decorate


def _fault(rule: Rule, source: Path) -> str:
    """Return how a source breaks a rule, or ""."""
    try:
        rule(source)
    except AssertionError as error:
        return f"{source.relative_to(ROOT)}: {error}"
    return ""
