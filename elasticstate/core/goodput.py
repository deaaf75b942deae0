"""Goodput: the share of the job's wall time that went into completed ticks.

The time of each generation counts from its first completed tick to its end. A generation ends with the failure, with
the last tick of the first member that leaves it, or when the exit gate opens. Ticks that are redone after a failure are
subtracted, each with the generation's mean tick time. All other time does not count: boot, regroup, sync, the first
tick of each generation, waiting.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace


class Goodput(Struct, frozen=True, gc=False):
    """Time that went into completed ticks so far. Times are of a monotonic clock."""

    generation: int = 0  # the newest with a completed tick
    since: float | None = None  # first tick of this generation, while the generation trains
    first: int = 1  # ticks that were complete at ``since``
    ended_s: float = 0.0  # productive time of the generations that have ended
    tick_s: float = 0.0  # mean tick time of the last generation that has ended

    def with_first_tick(self, generation: int, now: float, ticks: int = 1) -> Goodput:
        """Begin a generation: its first tick is complete, or the first ``ticks`` if a driver has reattached."""
        return replace(self, generation=generation, since=now, first=ticks) if generation > self.generation else self

    def with_end(self, ticks: int, at: float) -> Goodput:
        """End the generation, in which ``ticks`` were completed. No effect if it has ended already."""
        if self.since is None:
            return self
        span_s = max(0.0, at - self.since)
        return replace(self, since=None, ended_s=self.ended_s + span_s, tick_s=span_s / max(1, ticks - self.first))

    def with_redone(self, ticks: int) -> Goodput:
        """Subtract ticks of the generation that has ended last: they have to be redone."""
        return replace(self, ended_s=max(0.0, self.ended_s - ticks * self.tick_s))

    def share(self, now: float, wall_s: float) -> float | None:
        """Return the goodput until ``now``, 0 to 1; None if no tick was completed."""
        if not self.generation:
            return None
        running_s = now - self.since if self.since is not None else 0.0
        return (self.ended_s + running_s) / max(wall_s, 1e-9)
