"""Lines of the log that strangers or libraries can cause as often as they like."""

from __future__ import annotations

from collections.abc import Callable

_MOST_SINGLE = 5  # of one kind, each with a line of its own
_MOST_KINDS = 32  # the lines of all further kinds are counted together
_FURTHER = ""


class CountedLines:
    """After a few lines of one kind, only each doubling of their number is written."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._counts: dict[str, int] = {}

    def put(self, kind: str, text: str) -> None:
        """Write a line of this kind, or only count it."""
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _FURTHER
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= _MOST_SINGLE or count & (count - 1) == 0:
            times = f" ({count} times so far)" if count > _MOST_SINGLE else ""
            self._write(f"{text}{times}")

    def refused(self, peer: str, reason: str) -> None:
        """Report a connection that was refused."""
        self.put(reason, f"refused a connection from {peer}: {reason}")
