"""How it is told: groups of lines with a mark each, and what to do about what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that is there, or is not."""

    is_there: bool
    text: str
    remedy: str = ""  # where it is not there
    notes: tuple[str, ...] = ()
    """What else there is to know about it."""

    def __str__(self) -> str:
        remedy = f": {self.remedy}" if self.remedy and not self.is_there else ""
        first = f"    [{'X' if self.is_there else ' '}] {self.text}{remedy}"
        return "\n".join([first, *(f"        {note}" for note in self.notes)])


def last_line(text: str) -> str:
    """The last one that says something; "" if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def render(lines: Iterable[Line]) -> str:
    """The lines of a group, below its title."""
    return "".join(f"{line}\n" for line in lines)
