"""Figures of a job: each is measured, or a lower bound if a report is missing.

``JobFigures`` is the only source of the figures in the summary, in the event ``job_finished`` and in the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticstate.core.texts import number_of
from elasticstate.core.types import CommitId

NAMES = ("downtime_s", "commits_lost", "ticks_lost")
"""Names of the losses in the event file."""


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


def losses_text(fields: Mapping[str, Any]) -> str:
    """Return ``0.09 s, 0 commits lost, 2 ticks redone``. A lower bound begins with ``at least``."""
    seconds, commits, ticks = (f"{'at least ' if name in fields['lower_bounds'] else ''}" for name in NAMES)
    seconds += "unknown (no ticks)" if fields["downtime_s"] is None else f"{fields['downtime_s']:.2f} s"
    commits += f"{number_of(fields['commits_lost'], 'commit')} lost"
    ticks += f"{number_of(fields['ticks_lost'], 'tick')} redone"
    return f"{seconds}, {commits}, {ticks}"


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Figures of a job. All but ``generations`` cover the time of one driver."""

    generations: int  # the number of the newest generation
    failures: int  # unplanned ends of generations
    losses: Losses
    goodput: float | None  # None: no tick was completed
    wall_s: float  # since the start of the driver

    def fields(self) -> dict[str, object]:
        """Return the figures as fields of an event."""
        goodput = None if self.goodput is None else round(self.goodput, 4)
        counts = {"generations": self.generations, "failures": self.failures}
        return {**counts, **self.losses.fields(), "goodput": goodput}

    def text(self) -> str:
        """Return ``3 generations, 2 failures, downtime 4.20 s, 0 commits lost, 2 ticks redone, goodput 83.1%``."""
        return f"{number_of(self.generations, 'generation')}, {self.text_of_driver()}"

    def text_of_driver(self) -> str:
        """Return the text without the generations, which may be those of several drivers."""
        goodput = [] if self.goodput is None else [f"goodput {self.goodput:.1%}"]
        downtime = f"downtime {losses_text(self.losses.fields())}"
        return ", ".join([number_of(self.failures, "failure"), downtime, *goodput])


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit that a generation started from. ``position``: the ticks from the start of the job to this commit."""

    generation: int
    commit: CommitId
    position: int
