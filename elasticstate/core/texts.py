"""Phrases that several texts share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SHOWN = 16
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch prints it before each line, if there is a process group
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*: ")


def number_of(count: int, what: str) -> str:
    """Return ``1 worker``, ``3 workers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def listed(items: Iterable[str], separator: str = ", ", shown: int = SHOWN, count: int | None = None) -> str:
    """Return the first items, and the number of the others. ``count``: of all, if ``items`` lacks some."""
    items = list(items)
    hidden = (len(items) if count is None else count) - shown
    more = [f"and {hidden} more"] if hidden > 0 else []
    return separator.join(items[:shown] + more)


def ranks_text(ranks: Sequence[int | None]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(map(str, ranks))}"


def exception_line(error: str) -> str:
    """Return the line of a traceback, with or without stack, that has the exception; "" if it is another text."""
    lines = _RANK.sub("", error.rstrip()).splitlines()
    if len(lines) == 1:
        return lines[0] if _EXCEPTION.match(lines[0]) else ""
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if not frames or not lines[0].startswith("Traceback ("):
        return ""
    return next((line for line in lines[frames[-1] :] if not line.startswith(" ")), "")
