"""Figures of a job, and the account of its time: each is measured, or a lower bound if a report is missing.

``JobFigures`` is the only source of the figures in the summary, in the event ``job_finished`` and in the status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import asdict, replace

from elasticstate.core.event_file import FigureFields, GenerationFinished, LossFields, TimeFields
from elasticstate.core.ids import CommitId
from elasticstate.core.types import number_of

# --------------------------------------------------------------------------------------------------------- time account
# Account of a job's time (docs/decisions/figures.md). Wall time = goodput + badput by cause, exactly, for each
# generation and for the job.


Cause = Literal[
    "boot",
    "waiting_for_hosts",
    "world_formation",
    "sync",
    "regroup",
    "drain",
    "redone_ticks",
    "commit_stall",
    "no_ticks",
    "no_driver",
    "exit",
]
Activity = Literal["goodput"] | Cause
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Times(Struct, frozen=True, gc=False):
    """Seconds of each part. ``goodput``: ticks that were completed and are kept. All others are badput, by cause."""

    goodput: float = 0.0
    boot: float = 0.0  # too few workers are READY, and there are enough slots
    waiting_for_hosts: float = 0.0  # too few slots
    world_formation: float = 0.0  # from the publication of a world to its last member's process groups
    sync: float = 0.0  # from there to the start of training on the last member
    regroup: float = 0.0  # from a failure or an interrupt to the publication of the next world
    drain: float = 0.0  # the same, for an interrupt that lets members leave
    redone_ticks: float = 0.0  # ticks that are done again, and the tick that a failure cut off
    commit_stall: float = 0.0  # ticks inside commit()
    no_ticks: float = 0.0  # training without a completed tick: before the first one, or in a standstill
    no_driver: float = 0.0  # no driver ran, and no report proves that ticks were completed
    exit: float = 0.0  # from the first member in the exit gate to the end

    @property
    def wall_s(self) -> float:
        return float(sum(asdict(self).values()))

    def badput(self) -> dict[Cause, float]:
        """Return the seconds of each cause that has any."""
        found: dict[Cause, float] = {cause: getattr(self, cause) for cause in CAUSES}
        return {cause: seconds for cause, seconds in found.items() if seconds > 0.0}

    def plus(self, part: Activity, seconds: float) -> Times:
        return replace(self, **{part: getattr(self, part) + seconds})

    def moved(self, source: Activity, target: Activity, seconds: float) -> Times:
        """Move time, at most as much as ``source`` has. A negative time moves back."""
        if seconds < 0.0:
            return self.moved(target, source, -seconds)
        has: float = getattr(self, source)
        seconds = min(seconds, has)
        return replace(self, **{source: has - seconds, target: getattr(self, target) + seconds})

    def fields(self) -> TimeFields:
        """Return the times as fields of an event."""
        badput: dict[str, float] = {
            cause: round(seconds, 6) for cause, seconds in self.badput().items() if seconds >= 1e-6
        }
        return {"wall_s": round(self.wall_s, 6), "goodput_s": round(self.goodput, 6), "badput_s": badput}

    def __add__(self, other: Times) -> Times:
        mine, others = asdict(self), asdict(other)
        return Times(**{part: mine[part] + others[part] for part in mine})


class FirstTickTimes(Struct, frozen=True, gc=False):
    """Times before the end of a world's first tick, of the member that began last, as far as reported."""

    train_s: float  # since the start of training
    ready_s: float  # since the process groups existed


class Cut(Struct, frozen=True, gc=False):
    """End of a generation by a failure. It is not known before READY when the last tick was completed."""

    at: float
    gap_s: float  # time before ``at`` in which no driver ran; counts as no_driver until ticks are proven
    unproven_s: float  # time before ``at`` that does not count as goodput
    is_proven: bool = False  # a survivor has reported the end of its last tick


class TimeAccount(Struct, frozen=True, gc=False):
    """Account of the present generation and of the job. Times are those of the core's clock."""

    activity: Activity = "boot"
    since: float | None = None  # up to here all time is in the parts; None: the job has not begun
    present: Times = Times()  # of the present generation: from the publication of its world to that of the next
    earlier: Times = Times()  # of all generations before
    stalled_s: float = 0.0  # commit stall of the present generation, as far as it was moved
    first: FirstTickTimes | None = None  # of the present generation
    formed_at: float | None = None  # when the present world was published
    trains_since: float | None = None  # when the member of the present world that began last began to train
    before_standstill: float | None = None  # ``no_ticks`` at the begin of the present standstill
    cut: Cut | None = None  # of the present generation
    gap_from: float | None = None  # since when no driver ran, if the present world did not survive that time
    tick_s: float = 0.0  # mean tick time of the last generation with ticks
    redone_earlier_s: float = 0.0  # time of earlier generations whose ticks are redone after the present one

    def job(self, now: float) -> Times:
        """Return the parts of the whole job until ``now``."""
        account = self.until(now)
        return account.earlier + account.present

    def fields(self) -> GenerationFinished:
        """Return the parts of the present generation as fields of an event."""
        return {**self.present.fields(), "redone_earlier_s": round(self.redone_earlier_s, 6)}

    def until(self, now: float) -> TimeAccount:
        """Add the time until ``now`` to the present activity."""
        if self.since is None:
            return replace(self, since=now)
        return replace(self, since=now, present=self.present.plus(self.activity, max(0.0, now - self.since)))

    def switched(self, activity: Activity, now: float) -> TimeAccount:
        """Change the activity."""
        if activity == self.activity and self.since is not None:
            return self
        return replace(self.until(now), activity=activity)

    def moved(self, source: Activity, target: Activity, seconds: float) -> TimeAccount:
        return replace(self, present=self.present.moved(source, target, seconds))

    # ------------------------------------------------------------------------------------ facts about earlier moments

    def with_first_tick(self, train_s: float, sync_s: float, now: float) -> TimeAccount:
        """Record a member's first tick: how long it took, and how long the sync before it took.

        The first report divides the time since the publication of the world. Later ones correct that: the member that
        began last decides, because the others have waited for it.
        """
        known, ready_s = self.first, train_s + sync_s
        if known is None:
            account = self.until(now)
            account = account.moved("no_ticks", "world_formation", account.present.no_ticks)
            account = account.moved("world_formation", "goodput", train_s).moved("world_formation", "sync", sync_s)
            return replace(account, first=FirstTickTimes(train_s, ready_s))
        account = self.moved("goodput", "sync", max(0.0, known.train_s - train_s))
        account = account.moved("sync", "world_formation", max(0.0, known.ready_s - ready_s))
        return replace(account, first=FirstTickTimes(min(known.train_s, train_s), min(known.ready_s, ready_s)))

    def with_training(self, began_at: float, now: float) -> TimeAccount:
        """Record when a member began to train in the present world, in which no tick was completed yet.

        The place of a worker is known a report later than it changed, and a world may fail before that. The member that
        began last decides, as in ``with_first_tick``.
        """
        if self.first is not None or self.formed_at is None or self.present.no_driver:
            return self
        if self.trains_since is not None and began_at <= self.trains_since:
            return self
        account = self.until(now)
        before_s = max(0.0, began_at - self.formed_at)
        account = account.moved("world_formation", "no_ticks", account.present.world_formation - before_s)
        return replace(account, trains_since=began_at)

    def with_commit_stall(self, seconds: float, now: float) -> TimeAccount:
        """Record that a member has spent ``seconds`` of the present generation's ticks in commits."""
        if seconds <= self.stalled_s:
            return self
        account = self.until(now)
        moved_s = min(seconds - self.stalled_s, account.present.goodput)
        account = account.moved("goodput", "commit_stall", moved_s)
        return replace(account, stalled_s=self.stalled_s + moved_s)

    def with_standstill(self, seconds: float, now: float) -> TimeAccount:
        """Record that no tick was completed for ``seconds``, and that this goes on."""
        if self.activity != "goodput":
            return self
        account = self.until(now)
        before = account.present.no_ticks
        return replace(account.moved("goodput", "no_ticks", seconds), activity="no_ticks", before_standstill=before)

    def with_completed_tick(self, now: float) -> TimeAccount:
        """Record that the tick of the present standstill is complete after all: its time is that of a tick."""
        before = self.before_standstill
        if before is None or self.activity != "no_ticks":
            return self
        account = self.until(now)
        account = account.moved("no_ticks", "goodput", account.present.no_ticks - before)
        return replace(account, activity="goodput", before_standstill=None)

    def with_planned_end(self, activity: Activity, paused_s: float, now: float) -> TimeAccount:
        """Record that the last tick has ended ``paused_s`` ago."""
        if self.activity != "goodput":
            return self
        return replace(self.until(now).moved("goodput", activity, paused_s), activity=activity)

    def with_failure(self, now: float) -> TimeAccount:
        """Record that a failure has ended the present generation."""
        if self.activity != "goodput" or self.cut is not None:
            return self
        gap_s = 0.0 if self.gap_from is None else now - self.gap_from
        return replace(self.until(now), activity="regroup", cut=Cut(now, gap_s, gap_s))

    def with_last_tick(self, ended_at: float) -> TimeAccount:
        """Record the end of a survivor's last tick before a failure. The latest one of all survivors counts."""
        cut = self.cut
        if cut is None:
            return self
        unproven_s = max(0.0, cut.at - ended_at)
        if cut.is_proven and unproven_s >= cut.unproven_s:
            return self
        account = self.moved("no_driver", "goodput", min(cut.unproven_s, cut.gap_s) - min(unproven_s, cut.gap_s))
        beyond = max(0.0, unproven_s - cut.gap_s) - max(0.0, cut.unproven_s - cut.gap_s)
        account = account.moved("goodput", "redone_ticks", beyond)
        return replace(account, cut=replace(cut, unproven_s=unproven_s, is_proven=True))

    def with_redone(self, ticks: int, completed: int) -> TimeAccount:
        """Move the time of ticks that are done again, each with the mean tick time. ``completed``: ticks of the present
        generation. Further ticks are those of earlier generations."""
        goodput = self.present.goodput
        tick_s = goodput / completed if completed else self.tick_s
        own = min(ticks, completed)
        account = self.moved("goodput", "redone_ticks", own * tick_s)
        earlier_s = min(self.earlier.goodput, (ticks - own) * tick_s)
        earlier = self.earlier.moved("goodput", "redone_ticks", earlier_s)
        return replace(account, tick_s=tick_s, earlier=earlier, redone_earlier_s=self.redone_earlier_s + earlier_s)

    def with_next_generation(self, now: float) -> TimeAccount:
        """End the present generation."""
        account = self.until(now)
        earlier = account.earlier + account.present
        return TimeAccount(account.activity, now, earlier=earlier, formed_at=now, tick_s=account.tick_s)

    # ---------------------------------------------------------------------------------------------- a change of driver

    def shifted(self, seconds: float) -> TimeAccount:
        """Return the account with the times of another clock, which is ahead by ``seconds``."""
        cut = None if self.cut is None else replace(self.cut, at=self.cut.at + seconds)
        moments = {name: getattr(self, name) for name in ("since", "gap_from", "formed_at", "trains_since")}
        return replace(self, cut=cut, **{name: None if at is None else at + seconds for name, at in moments.items()})

    def with_gap(self, seen_at: float, now: float) -> TimeAccount:
        """Record that no driver ran from ``seen_at`` until now, and that the activity has not gone on until now."""
        cut = self.cut if self.activity == "goodput" else Cut(now, 0.0, 0.0, is_proven=True)
        gap_from = min(now, seen_at if self.since is None else max(seen_at, self.since))
        account = self.until(gap_from)
        return replace(
            account, since=now, present=account.present.plus("no_driver", now - gap_from), gap_from=gap_from, cut=cut
        )


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

    def fields(self) -> LossFields:
        """Return the figures as fields of an event."""
        fields: LossFields = {
            "downtime_s": None if self.downtime_s is None else round(self.downtime_s, 6),
            "commits_lost": self.commits,
            "ticks_lost": self.ticks,
            "lower_bounds": [name for name in NAMES if name in self.lower_bounds],
        }
        if uncommitted_s := round(self.uncommitted_s, 6):
            fields["uncommitted_s"] = uncommitted_s
        if unfinished_s := round(self.unfinished_s, 6):
            fields["unfinished_s"] = unfinished_s
        return fields


def losses_text(fields: LossFields) -> str:
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

    def fields(self) -> FigureFields:
        """Return the figures as fields of an event."""
        return {
            "generations": self.generations,
            "failures": self.failures,
            **self.losses.fields(),
            "goodput": None if self.goodput is None else round(self.goodput, 4),
            **self.times.fields(),
        }

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
