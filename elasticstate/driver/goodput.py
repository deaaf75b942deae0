"""Goodput: the share of the job's wall time that went into completed ticks.

The time of each generation counts from its first completed tick to its end. Ticks that are redone after a failure are
subtracted, each with the generation's mean tick time. A generation ends by END now, or with the last tick of the first
worker that leaves it at an interrupt, or when the gate opens. All other time does not count: boot, regroup, sync, the
first tick of each generation, waiting.
"""

from __future__ import annotations


class Goodput:
    """Measures goodput from the messages that the driver receives. Times are of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._productive_s = 0.0
        self._since: float | None = None  # first tick of the running generation
        self._ticks = 0  # of the running generation
        self._tick_s = 0.0  # mean tick time of the last generation that has ended
        self.generation = 0

    def first_tick(self, generation: int, now: float) -> None:
        """Begin a generation: the first worker has completed its first tick."""
        if generation > self.generation:
            self.generation, self._since, self._ticks = generation, now, 1

    def ticks(self, generation: int, ticks: int) -> None:
        """Record the number of ticks that a worker has completed."""
        if generation == self.generation:
            self._ticks = max(self._ticks, ticks)

    def end(self, now: float) -> None:
        """End the generation."""
        if self._since is not None:
            span_s = max(0.0, now - self._since)
            self._productive_s += span_s
            self._tick_s = span_s / max(1, self._ticks - 1)
            self._since = None

    def left(self, generation: int, stopped_at: float) -> None:
        """End the generation of a worker that has sent READY. It has trained until ``stopped_at``."""
        if generation == self.generation:
            self.end(stopped_at)

    def lost(self, ticks: int) -> None:
        """Subtract ticks that have to be redone."""
        self._productive_s = max(0.0, self._productive_s - ticks * self._tick_s)

    def share(self, now: float) -> float | None:
        """Return the goodput, 0 to 1; None if no tick was completed."""
        if not self.generation:
            return None
        running_s = now - self._since if self._since is not None else 0.0
        return (self._productive_s + running_s) / max(now - self._started_at, 1e-9)
