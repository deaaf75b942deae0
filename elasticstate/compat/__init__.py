"""Private names of torch, Python and Lightning: one module per concern, with the versions in which they were checked.

A test in tests/unit/compat fails when a new version changes a name. At run time, the feature that needs an absent name
disables itself with one warning, or does the same more slowly with public names. What could be wrong in silence, if a
name had got another meaning, disables itself with all versions that were not checked (``warn_unchecked``).
"""

from __future__ import annotations

import functools
import re
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from elasticstate.log import logger

CHECKED = {"torch": "2.11 to 2.15", "Python": "3.10 to 3.13", "lightning": "2.6"}
"""The versions in which the names of this package were checked (``make test-versions``)."""


@functools.cache
def warn_absent(library: str, name: str, effect: str) -> None:
    """Log once that the installed library does not have this name. ``effect``: the consequence, as a clause."""
    logger.warning(
        "%s %s has no %s, so %s. Install %s %s, or a newer version of elasticstate.",
        library,
        _installed(library),
        name,
        effect,
        library,
        CHECKED[library],
    )


@functools.cache
def warn_unchecked(library: str, effect: str) -> bool:
    """Return True, and log it, if the installed version was not checked. ``effect``: the consequence, as a clause."""
    first, _, last = CHECKED[library].partition(" to ")
    if _number(first) <= _number(_installed(library)) <= _number(last or first):
        return False
    logger.warning(
        "This elasticstate was checked with %s %s, and not with %s, so %s. Install one of these, or a newer version of "
        "elasticstate.",
        library,
        CHECKED[library],
        _installed(library),
        effect,
    )
    return True


def _number(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _installed(library: str) -> str:
    if library == "Python":
        return python_version()
    try:
        return version(library)
    except PackageNotFoundError:
        return "(unknown version)"
