"""Figures for the cost of failures and planned changes. Each is measured, or a lower bound if a report is missing."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate.core.types import CommitId

NAMES = ("downtime_s", "commits_lost", "ticks_lost")
"""Names of the figures in the event file."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Time without training, commits lost, ticks to do again. ``downtime_s`` None: not known before a tick."""

    downtime_s: float | None = 0.0
    commits: int = 0
    ticks: int = 0
    lower_bounds: frozenset[str] = frozenset()  # the NAMES whose figure is a lower bound

    def __add__(self, other: Losses) -> Losses:
        downtimes = (self.downtime_s, other.downtime_s)
        return Losses(
            None if None in downtimes else sum(filter(None, downtimes), 0.0),
            self.commits + other.commits,
            self.ticks + other.ticks,
            self.lower_bounds | other.lower_bounds,
        )

    def fields(self) -> dict[str, object]:
        """Return the figures as fields of an event."""
        downtime_s = None if self.downtime_s is None else round(self.downtime_s, 6)
        bounds = [name for name in NAMES if name in self.lower_bounds]
        return dict(zip(NAMES, (downtime_s, self.commits, self.ticks), strict=True)) | {"lower_bounds": bounds}


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit that a generation started from. ``position``: the ticks from the start of the job to this commit."""

    generation: int
    commit: CommitId
    position: int
