"""Figures of the durable copies of a job, for status and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elasticstate.core.types import CommitId
from elasticstate.machine import format_bytes


@dataclass(slots=True)
class DurableFigures:
    """Figures of the durable copies that this driver has ordered. Times: the event loop's clock."""

    saved: int = 0
    failed: int = 0
    newest: CommitId | None = None  # the commit in the newest copy
    newest_at: float | None = None  # when that copy was begun
    newest_bytes: int = 0
    unsaved: CommitId | None = None  # the last commit of the job, if it could not be saved
    trouble: str = ""  # why the last attempt failed; "" after a success

    def age_s(self, now: float) -> float | None:
        """Return the age of the newest copy; None if there is none yet."""
        return None if self.newest_at is None else now - self.newest_at

    def lines(self, now: float) -> Iterator[str]:
        """Yield the lines of ``elasticrun status``."""
        age_s = self.age_s(now)
        newest = "none yet" if age_s is None else f"the newest is {age_s:.0f} s old: commit {self.newest}"
        size = f", {format_bytes(self.newest_bytes)}" if self.newest_bytes else ""
        yield f"{newest}{size}; {self.saved} saved, {self.failed} failed"
        if self.trouble:
            yield f"the last attempt failed: {self.trouble}"
