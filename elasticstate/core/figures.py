"""Figures of a job: each is measured, or a lower bound if a report is missing.

``JobFigures`` is the only source of the figures in the summary, in the event ``job_finished`` and in the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from elasticstate.core.texts import number_of
from elasticstate.core.time_account import TimeAccount, Times
from elasticstate.core.types import CommitId

_SHOWN = 3  # causes of badput in the summary
_LEAST = 0.001  # share of the time from which the summary shows a cause
NAMES = ("downtime_s", "commits_lost", "ticks_lost")
"""Names of the losses in the event file."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Time without training, commits lost, ticks to do again. ``downtime_s`` None: not known before a tick."""

    downtime_s: float | None = 0.0
    commits: int = 0
    ticks: int = 0
    lower_bounds: frozenset[str] = frozenset()  # the NAMES whose figure is a lower bound
    uncommitted_s: float = 0.0  # seconds of training that were lost because the job had never committed
    unfinished_s: float = 0.0  # seconds of training since a last tick that were lost, if they were not few

    def __add__(self, other: Losses) -> Losses:
        downtimes = (self.downtime_s, other.downtime_s)
        return Losses(
            None if None in downtimes else sum(filter(None, downtimes), 0.0),
            self.commits + other.commits,
            self.ticks + other.ticks,
            self.lower_bounds | other.lower_bounds,
            self.uncommitted_s + other.uncommitted_s,
            self.unfinished_s + other.unfinished_s,
        )

    def fields(self) -> dict[str, object]:
        """Return the figures as fields of an event."""
        downtime_s = None if self.downtime_s is None else round(self.downtime_s, 6)
        fields: dict[str, object] = dict(zip(NAMES, (downtime_s, self.commits, self.ticks), strict=True))
        fields["lower_bounds"] = [name for name in NAMES if name in self.lower_bounds]
        if uncommitted_s := round(self.uncommitted_s, 6):
            fields["uncommitted_s"] = uncommitted_s
        if unfinished_s := round(self.unfinished_s, 6):
            fields["unfinished_s"] = unfinished_s
        return fields


def losses_text(fields: Mapping[str, Any]) -> str:
    """Return ``0.09 s, 0 commits lost, 2 ticks redone``. A lower bound begins with ``at least``.

    Work that was lost because the job had never committed, or in long ticks that were not completed, follows.
    """
    seconds, commits, ticks = (f"{'at least ' if name in fields['lower_bounds'] else ''}" for name in NAMES)
    seconds += "unknown (no ticks)" if fields["downtime_s"] is None else f"{fields['downtime_s']:.2f} s"
    commits += f"{number_of(fields['commits_lost'], 'commit')} lost"
    ticks += f"{number_of(fields['ticks_lost'], 'tick')} redone"
    uncommitted_s, unfinished_s = fields.get("uncommitted_s", 0.0), fields.get("unfinished_s", 0.0)
    if round(uncommitted_s, 1) and fields["downtime_s"] is None:
        ticks = "an unknown number of steps redone"
    parts = [seconds, commits, ticks]
    if round(uncommitted_s, 1):
        parts.append(f"{uncommitted_s:.1f} s of training lost because nothing was committed")
    if round(unfinished_s, 1):
        parts.append(f"{unfinished_s:.1f} s of uncompleted ticks lost")
    return ", ".join(parts)


class PastFigures(Struct, frozen=True):
    """Figures of a job's drivers up to one time, for the next driver."""

    account: TimeAccount = TimeAccount()
    failures: int = 0
    losses: Losses = Losses()

    def shifted(self, seconds: float) -> PastFigures:
        """Return the figures with the times of another clock, which is ahead by ``seconds``."""
        return replace(self, account=self.account.shifted(seconds))


NO_PAST = PastFigures()


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Figures of a job since its start, over all its drivers."""

    generations: int  # the number of the newest generation
    failures: int  # unplanned ends of generations
    losses: Losses
    times: Times
    has_ticked: bool  # some world has completed a tick

    @property
    def wall_s(self) -> float:
        """Seconds since the start of the job."""
        return self.times.wall_s

    @property
    def goodput(self) -> float | None:
        """Share of the wall time, 0 to 1; None if no tick was completed."""
        return self.times.goodput / max(self.wall_s, 1e-9) if self.has_ticked else None

    def fields(self) -> dict[str, object]:
        """Return the figures as fields of an event."""
        goodput = None if self.goodput is None else round(self.goodput, 4)
        counts = {"generations": self.generations, "failures": self.failures}
        return {**counts, **self.losses.fields(), "goodput": goodput, **self.times.fields()}

    def text(self) -> str:
        """Return ``3 generations, 2 failures, downtime 4.20 s, 0 commits lost, 2 ticks redone, goodput 83.1%, badput:
        boot 9.0%, regroup 4.1%``."""
        counts = [number_of(self.generations, "generation"), number_of(self.failures, "failure")]
        goodput = [] if self.goodput is None else [f"goodput {self.goodput:.1%}", *self._badput_text()]
        return ", ".join([*counts, f"downtime {losses_text(self.losses.fields())}", *goodput])

    def _badput_text(self) -> list[str]:
        """Return the largest parts of the badput."""
        found = sorted(self.times.badput().items(), key=lambda part: -part[1])[:_SHOWN]
        shares = [f"{cause_text(cause)} {share:.1%}" for cause, s in found if (share := s / self.wall_s) >= _LEAST]
        return [f"badput: {', '.join(shares)}"] if shares else []

    def times_text(self) -> str:
        """Return ``125.00 s = goodput 104.00 s (83.2%) + boot 11.20 s (9.0%) + ...``, with all causes."""
        parts: dict[str, float] = {"goodput": self.times.goodput} | dict(self.times.badput().items())
        texts = (f"{cause_text(part)} {s:.2f} s ({s / max(self.wall_s, 1e-9):.1%})" for part, s in parts.items())
        return f"{self.wall_s:.2f} s = {' + '.join(texts)}"


def cause_text(cause: str) -> str:
    """Return the name of a part of the time in words."""
    return cause.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit that a generation started from. ``position``: the ticks from the start of the job to this commit."""

    generation: int
    commit: CommitId
    position: int
