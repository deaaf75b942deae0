"""Private names of torch, Python and Lightning: one module per concern, with the versions in which they were checked.

A test in tests/unit/compat fails when a new version changes a name. At run time, the feature that needs an absent name
disables itself with one warning, or does the same more slowly with public names.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from elasticstate.log import logger

CHECKED = {"torch": "2.13", "Python": "3.11", "lightning": "2.6"}
"""The versions in which the names of this package were checked."""


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


def _installed(library: str) -> str:
    if library == "Python":
        return python_version()
    try:
        return version(library)
    except PackageNotFoundError:
        return "(unknown version)"
