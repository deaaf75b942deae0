"""The language of the project: first words of docstrings, and the help of options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from elasticstate.options import declarations
from tests.kit.sources import ROOT, of_each, tree_of

DOCUMENTED = [path for name in ("elasticstate", "tests", "examples") for path in sorted((ROOT / name).rglob("*.py"))]

BAD_BEGINNING = re.compile(r"(Of|Whether|Who|What|How|When)\b")


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of the module, of its classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_the_help_of_an_option_is_made_of_sentences() -> None:
    texts = [option.help for option in declarations().values()]
    assert [text for text in texts if not text[0].isupper() or not text.endswith(".")] == []


@of_each(DOCUMENTED)
def test_no_docstring_begins_with_a_relative_word(source: Path) -> None:
    tree = tree_of(source)
    assert [text.splitlines()[0] for text in docstrings(tree) if BAD_BEGINNING.match(text.lstrip())] == []
