"""``elasticrun --check``: print what is available on this machine and on the named hosts.

This process loads neither torch nor MPI: children load them, and may crash or hang.

Its output is groups of lines, each with a mark, and a remedy for each missing part.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Line:
    """One part that is available, or is not."""

    is_available: bool
    text: str
    remedy: str = ""  # shown if the part is not available
    notes: tuple[str, ...] = ()
    """Further facts about the part."""

    def __str__(self) -> str:
        remedy = f": {self.remedy}" if self.remedy and not self.is_available else ""
        first = f"    [{'X' if self.is_available else ' '}] {self.text}{remedy}"
        return "\n".join([first, *(f"        {note}" for note in self.notes)])


class BackendFindings(NamedTuple):
    """Findings about one backend."""

    lines: list[Line]
    problem: str  # the reason why --backend cannot name this backend, and the remedy; empty: it can


SearchForBackend = Callable[[float], Awaitable[BackendFindings]]
"""Search for the parts of a backend on this machine. The argument limits the seconds of each step."""


def last_line(text: str) -> str:
    """Return the last line that is not blank; "" if there is none."""
    return (text.strip().splitlines() or [""])[-1].strip()


def facts_of(text: str) -> dict[str, Any]:
    """Return the merged JSON objects that a probe has printed, one per line. Other lines are ignored."""
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            fact = json.loads(line)
        except ValueError:
            continue  # output of another library
        if isinstance(fact, dict):
            facts |= fact
    return facts


def render(lines: Iterable[Line]) -> str:
    """Return the text of a group's lines, without its title."""
    return "".join(f"{line}\n" for line in lines)
