"""Goodput: the share of the job's wall time that went into completed ticks.

Counted is the time from the first completed tick of each generation to its end (END, or the opening of the gate), less
the ticks that had to be done again after a failure, at the generation's mean time of a tick. Not counted is all else:
boot, regroup, sync, the first tick of each generation, waiting.
"""

from __future__ import annotations


class Goodput:
    """Fed by the driver with what it hears. Instants are of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._productive_s = 0.0
        self._since: float | None = None  # the first tick of the generation that runs
        self._ticks = 0  # of that generation
        self._tick_s = 0.0  # the mean of the last one that has ended
        self.generation = 0

    def first_tick(self, generation: int, now: float) -> None:
        """The first worker has completed the first tick of a generation."""
        if generation > self.generation:
            self.generation, self._since, self._ticks = generation, now, 1

    def ticks(self, generation: int, ticks: int) -> None:
        """A worker has completed so many ticks."""
        if generation == self.generation:
            self._ticks = max(self._ticks, ticks)

    def end(self, now: float) -> None:
        """The generation has ended."""
        if self._since is not None:
            span_s = now - self._since
            self._productive_s += span_s
            self._tick_s = span_s / max(1, self._ticks - 1)
            self._since = None

    def lost(self, ticks: int) -> None:
        """So many of its ticks have to be done again."""
        self._productive_s = max(0.0, self._productive_s - ticks * self._tick_s)

    def share(self, now: float) -> float | None:
        """0 to 1; None when no tick was ever completed."""
        if not self.generation:
            return None
        running_s = now - self._since if self._since is not None else 0.0
        return (self._productive_s + running_s) / max(now - self._started_at, 1e-9)
