"""History of one run of a job, with its workers and the copies of its commits, made from its events in one pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from signal import SIGTERM
from typing import Any, NamedTuple

from elasticstate.core import event_file
from elasticstate.core.ids import WorkerId
from elasticstate.core.state import NEWCOMER
from elasticstate.core.worlds import assign
from elasticstate.failures import status_of
from elasticstate.history.event_files import Event, number, runs_of

# --------------------------------------------------------------------------------------------------------------- copies
# Copies of a job's commits, made from its events: replication from host to host, and durable copies.


_NEXT_ATTEMPT = re.compile(r"; next attempt in [\d.e+]+ s$")
_COMMIT = re.compile(r"\(\d+, \d+\)")


class CopyFailure(NamedTuple):
    """Failures with one reason."""

    what: str  # replication or durable copy
    kind: str  # of a failure of the storage; else empty
    reason: str  # of the last one
    times: int
    first: float
    last: float


@dataclass(slots=True)
class CopiesHistory:
    """Copies of one job."""

    replications: list[event_file.Replication] = field(default_factory=list)
    saved: list[event_file.DurableCopy] = field(default_factory=list)
    not_saved: list[float] = field(default_factory=list)  # times of failed attempts
    _failures: dict[tuple[str, str, str], CopyFailure] = field(default_factory=dict)

    @property
    def replicated(self) -> int:
        return sum(found["replicated"] for found in self.replications)

    @property
    def failed(self) -> int:
        """Return the number of replications that failed."""
        return sum(found["failed"] for found in self.replications)

    @property
    def sent_bytes(self) -> int:
        return sum(found["bytes"] for found in self.replications)

    @property
    def failures(self) -> list[CopyFailure]:
        """Return the failures by reason, the most frequent first."""
        return sorted(self._failures.values(), key=lambda failure: -failure.times)

    def on_replication(self, e: event_file.Replication) -> None:
        self.replications.append(e)
        if e["failed"]:
            reason = e.get("reason", "")
            self._failed(("replication", "", _COMMIT.sub("", reason)), reason, e["failed"], e["time"])

    def on_durable_copy(self, e: event_file.DurableCopy) -> None:
        if e["state"] == "saved":
            self.saved.append(e)
        else:
            self.not_saved.append(e["time"])
            reason = _NEXT_ATTEMPT.sub("", e.get("reason", ""))
            alike = reason.replace(e["folder"], "")
            self._failed(("durable copy", e.get("kind", ""), alike), reason, 1, e["time"])

    def _failed(self, key: tuple[str, str, str], reason: str, count: int, time: float) -> None:
        """Count failures. ``key``: what failed, the kind, and the reason without what differs each time."""
        before = self._failures.get(key)
        first, times = (time, count) if before is None else (before.first, before.times + count)
        self._failures[key] = CopyFailure(*key[:2], reason, times, first, time)


# --------------------------------------------------------------------------------------------------------- worker spans
# Spans of workers: what each process did from its start to its exit.


Details = dict[str, Any]

_NAMES = {"boot": "boot", "ready": "ready, waits for a world", "leaving": "leaves the failed generation"}
_SHORTEST = 1e-6  # seconds of a wait: members are READY as the next world forms


class Span(NamedTuple):
    """Span of the job, of a host, or of a slot. Those of a slot lie in those that begin before and end after them."""

    kind: str  # of a slot: worker, boot, ready, generation, formation, sync, leaving or down; others: see trace.py
    host: str | None
    slot: int | None
    name: str
    begin: float
    end: float
    details: Details

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class WorkerFailed(NamedTuple):
    """Unplanned end of a worker."""

    time: float
    host: str
    slot: int
    rank: int | None
    generation: int
    how: str
    error: str


@dataclass(slots=True)
class _Life:
    worker: str
    host: str
    slot: int
    started: float
    since: float  # begin of the phase
    phase: str = "boot"
    generation: int = 0
    rank: int | None = None
    resumed: float | None = None
    synced: tuple[float, float, int] | None = None  # begin, end, bytes
    unresponsive: str = ""
    draining: bool = False


Sink = Callable[[Span], None]


def worker_id(worker: str) -> WorkerId:
    """Return the id whose text is ``worker``. Raises ValueError."""
    slot, _, incarnation = worker.rpartition("#")
    host, _, index = slot.rpartition(":")
    return WorkerId(host, int(index), int(incarnation))


def placed(ages: dict[str, int], joined: Iterable[str]) -> list[str]:
    """Return the members of a world by their ranks, by the rule of the core, and give those that have joined ages."""
    members = [(worker_id(worker), ages.get(worker, NEWCOMER)) for worker in dict.fromkeys((*ages, *joined))]
    found = [str(placement.worker) for placement in assign(members)]
    numbers = count(max(ages.values(), default=0) + 1)
    ages.update((worker, next(numbers)) for worker in found if worker not in ages)
    return found


@dataclass(slots=True)
class WorkerSpans:
    """Tracker of all workers of a job. It passes each span to ``sink`` when the span ends."""

    sink: Sink
    failures: list[WorkerFailed] = field(default_factory=list)
    _lives: dict[str, _Life] = field(default_factory=dict)  # by worker
    _slots: dict[tuple[str, int], _Life] = field(default_factory=dict)
    _down: dict[tuple[str, int], tuple[float, str, Details]] = field(default_factory=dict)  # slots whose worker failed
    _ages: dict[str, int] = field(default_factory=dict)  # of the members of the newest world
    _is_whole: bool = False  # all members are known
    _is_over: bool = False

    def on_worker_started(self, e: event_file.WorkerFields) -> None:
        place = (e["host"], e["slot"])
        for known in (self._slots.get(place), self._lives.get(e["worker"])):
            if known is not None and known.worker in self._lives:
                self._end(known, e["time"], "its exit was not reported", {})
        self._down_ends(place, e["time"])
        life = _Life(e["worker"], *place, e["time"], e["time"])
        self._lives[e["worker"]] = self._slots[place] = life

    def on_worker_ready(self, e: event_file.WorkerReady) -> None:
        self._enter(self._known(e), "ready", e["time"])

    def on_world_formed(self, e: event_file.WorldFormed) -> None:
        joined = e["joined"]
        for worker in (*e["left"], *joined):
            self._ages.pop(worker, None)
        self._is_whole = (self._is_whole or not self._ages) and len(self._ages) + len(joined) == e["size"]
        for rank, worker in enumerate(placed(self._ages, joined)):
            life = self._lives.get(worker)
            if life is not None:
                self._enter(life, "generation", e["time"])
                life.generation, life.rank = e["generation"], rank if self._is_whole else None
                life.resumed = life.synced = None

    def on_training_resumed(self, e: event_file.TrainingResumed) -> None:
        for life in self._living_members():
            life.resumed = max(life.since, e["time"])

    def on_sync(self, e: event_file.Sync) -> None:
        life = self._lives.get(e["worker"])
        if life is not None and life.phase == "generation":
            life.synced = (e["time"] - e["seconds"], e["time"], e["bytes"])

    def generation_failed(self, e: event_file.CommonFields) -> None:
        for life in self._living_members():
            self._enter(life, "leaving", e["time"])

    def on_worker_unresponsive(self, e: event_file.WorkerUnresponsive) -> None:
        life = self._lives.get(e["worker"])
        if life is not None:
            life.unresponsive = e["reason"]

    def on_host_draining(self, e: event_file.HostDraining) -> None:
        for life in self._lives.values():
            life.draining = life.draining or life.host == e["host"]

    def exited(self, e: event_file.WorkerExited) -> WorkerFailed | None:
        """Record the end of a worker; return the failure if it is one."""
        life, how = self._known(e), status_of(e["exit_code"], e["signal"])
        details = {"exit": how, "rank": e["rank"], "pid": e.get("pid")}
        if life.unresponsive:
            how = details["exit"] = f"unresponsive, {how}"
        error = str(e.get("error") or "")
        if last := error.strip().rpartition("\n")[2]:
            details["error"] = last[:500]
        failed = self._is_failure(life, e)
        self._end(life, e["time"], how, details)
        if not failed:
            return None
        self._down[life.host, life.slot] = (max(e["time"], life.since), how, details)
        failure = WorkerFailed(e["time"], life.host, life.slot, e["rank"], e["generation"], how, error)
        self.failures.append(failure)
        return failure

    def on_host_removed(self, e: event_file.HostRemoved) -> None:
        for place in [place for place in self._down if place[0] == e["host"]]:
            self._down_ends(place, e["time"])

    def on_root_cause(self, e: event_file.RootCause) -> None:
        """The job ends: the driver now stops the workers, and their ends are no failures."""
        self._is_over = True

    def close(self, time: float, why: str) -> None:
        """End all spans."""
        for life in list(self._lives.values()):
            self._end(life, time, why, {})
        for place in list(self._down):
            self._down_ends(place, time)

    # ---------------------------------------------------------------------------------------------------- the parts

    def _known(self, e: event_file.WorkerFields) -> _Life:
        """Return the worker of an event. Of a worker without a start (its host was unreachable, or the file begins in
        the middle of the job), the life begins with the event."""
        if e["worker"] not in self._lives:
            self.on_worker_started(e)
        return self._lives[e["worker"]]

    def _living_members(self) -> Iterable[_Life]:
        found = (self._lives.get(worker) for worker in self._ages)
        return [life for life in found if life is not None and life.phase == "generation"]

    def _enter(self, life: _Life, phase: str, time: float) -> None:
        self._end_phase(life, time)
        life.phase, life.since = phase, max(life.since, time)

    def _end_phase(self, life: _Life, time: float) -> None:
        end = max(life.since, time)
        if life.phase != "generation":
            if life.phase == "boot" or end - life.since >= _SHORTEST:
                self._emit(life, life.phase, _NAMES[life.phase], life.since, end, {})
            return
        rank = "" if life.rank is None else f", rank {life.rank}"
        details = {"generation": life.generation, "rank": life.rank}
        self._emit(life, "generation", f"training in generation {life.generation}{rank}", life.since, end, details)
        trained = end if life.resumed is None else min(life.resumed, end)
        if life.resumed is not None:
            self._emit(life, "formation", "world formation", life.since, trained, {"generation": life.generation})
        if life.synced is not None:
            begin, synced, size = life.synced
            synced = min(max(synced, life.since), trained)
            self._emit(life, "sync", "sync", min(max(begin, life.since), synced), synced, {"bytes": size})

    def _end(self, life: _Life, time: float, how: str, details: Details) -> None:
        end = max(life.since, time)
        self._end_phase(life, end)
        self._emit(life, "worker", life.worker, life.started, end, {"end": how, **details})
        life.since = end
        del self._lives[life.worker]
        del self._slots[life.host, life.slot]

    def _down_ends(self, place: tuple[str, int], time: float) -> None:
        if place in self._down:
            begin, how, details = self._down.pop(place)
            self.sink(Span("down", *place, f"exited: {how}", begin, max(begin, time), details))

    def _emit(self, life: _Life, kind: str, name: str, begin: float, end: float, details: Details) -> None:
        self.sink(Span(kind, life.host, life.slot, name, begin, end, details))

    def _is_failure(self, life: _Life, e: event_file.WorkerExited) -> bool:
        """Return True for an end that the driver did not ask for. When it stops the job, the events do not say so:
        workers that boot end by SIGTERM then, and READY workers (spares) end by an exit code."""
        if self._is_over or e.get("expected") or life.draining or e["exit_code"] == 0:
            return False
        is_member = life.phase in ("generation", "leaving")
        return is_member or not (e["signal"] == SIGTERM or (life.phase == "ready" and e["exit_code"] is not None))


@dataclass(slots=True)
class GenerationHistory:
    """History of one generation."""

    number: int
    formed: float
    size: int
    hosts: int
    joined: list[str]
    left: list[str]
    cause: str  # end of the generation before, or empty
    planned: bool = False  # its beginning was planned
    resumed: float | None = None
    downtime_s: float | None = None
    ticks_lost: int = 0
    lower_bounds: tuple[str, ...] = ()
    end_decided: float | None = None
    end_cause: str = ""
    end_tick: int | None = None
    end_planned: bool = False  # else a failure ended the generation
    last_tick: float | None = None  # first member that left at the end of ``end_tick``
    ended: float | None = None  # the next world, or the end of the job

    @property
    def ticks_per_s(self) -> float | None:
        """Mean rate of the ticks between the first and the last one; None without an end at a known tick."""
        if self.end_tick is None or self.last_tick is None:
            return None
        first, ticks = (self.formed, self.end_tick) if self.resumed is None else (self.resumed, self.end_tick - 1)
        return ticks / (self.last_tick - first) if ticks > 0 and self.last_tick > first else None


class JobMark(NamedTuple):
    """Something that happened at one time."""

    time: float
    kind: str  # failure, interrupt, host, agent, driver, warning or job
    host: str | None
    name: str
    details: Details


class Shares(NamedTuple):
    """Account of some time: seconds by part, with the part ``goodput`` first."""

    wall_s: float
    parts: dict[str, float]


def shares_of(event: Mapping[str, Any]) -> Shares | None:
    """Return the account of time that an event has; None for an event without one."""
    goodput, badput = number(event, "goodput_s"), event.get("badput_s")
    if goodput is None or not isinstance(badput, dict):
        return None
    parts = {"goodput": goodput}
    parts |= {str(cause): seconds for cause in badput if (seconds := number(badput, cause)) is not None}
    return Shares(number(event, "wall_s") or sum(parts.values()), parts)


@dataclass(slots=True)
class JobHistory:
    """History of one run of a job. Call ``add`` for each event, then ``close``.

    ``path``: the event file. ``sink`` receives the spans of workers, ``other`` all other spans, both as they end.
    """

    job: str
    path: str
    began: float
    sink: Sink
    last: float = 0.0
    started: event_file.JobStarted | None = None
    finished: event_file.JobFinished | None = None
    root_cause: event_file.RootCause | None = None
    drivers: int = 1
    generations: list[GenerationHistory] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[JobMark] = field(default_factory=list)
    failures: list[WorkerFailed] = field(default_factory=list)
    goodput: list[tuple[float, float]] = field(default_factory=list)  # time, share since the start
    syncs: list[event_file.Sync] = field(default_factory=list)
    copies: CopiesHistory = field(default_factory=CopiesHistory)
    _workers: WorkerSpans = field(init=False)
    _begun: dict[tuple[str, str], Span] = field(default_factory=dict)  # by kind and key; each with its latest end
    _kept_s: float = 0.0  # goodput of the generations so far
    _wall_s: float = 0.0  # time of the generations so far

    def __post_init__(self) -> None:
        self.last = self.began
        self._workers = WorkerSpans(self.sink, self.failures)

    @property
    def _newest(self) -> GenerationHistory | None:
        return self.generations[-1] if self.generations else None

    def add(self, e: Event) -> None:
        """Add an event. The time of this history never goes back, even if the clock was set back."""
        e["time"] = max(self.last, e["time"])
        for part in (self, self._workers, self.copies):
            handler: Callable[[Event], None] | None = getattr(part, f"on_{e['event']}", None)
            if handler is not None:
                handler(e)
        self.last = e["time"]

    def close(self) -> None:
        """End all spans: the file has no further event of this run."""
        if self._newest is not None and self._newest.ended is None:
            self._newest.ended = self.last
        for kind, details in (("drain", {}), ("cooldown", {}), ("stall", {"end": "the file ends"})):
            for key in [key for of, key in self._begun if of == kind]:
                self._ends(kind, key, self.last, **details)
        self._workers.close(self.last, "the job ended" if self.finished else "the file ends")
        if self.sizes:
            self.sizes.append((self.last, 0 if self.finished else self.sizes[-1][1]))

    def on_job_started(self, e: event_file.JobStarted) -> None:
        self.started = e

    def on_job_finished(self, e: event_file.JobFinished) -> None:
        self.finished = e
        if self._newest is not None:
            self._newest.ended = e["time"]
        share = number(e, "goodput")
        if share is not None:
            self.goodput.append((e["time"], share))
        self._mark(e, "job", f"job {e['status']}", failures=e["failures"], goodput=share)

    def on_root_cause(self, e: event_file.RootCause) -> None:
        self.root_cause = e
        self._mark(e, "failure", f"root cause: {e['reason']}")

    def on_driver_restarted(self, e: event_file.DriverRestarted) -> None:
        self.drivers = max(self.drivers + 1, e["epoch"])
        self._span("driver", None, f"no event until driver {e['epoch']} reattached", self.last, e["time"], {})
        self._mark(e, "driver", f"driver {e['epoch']} reattached", back=e.get("back"), lost=e.get("lost"))

    def on_stall(self, e: event_file.Stall) -> None:
        self._stall_begins(e["call"], e["time"] - e["seconds"], e["who"])

    def on_no_tick(self, e: event_file.NoTick) -> None:
        self._stall_begins("no tick", e["time"] - e["seconds"], e["text"])

    def _stall_begins(self, call: str, begin: float, missing: str) -> None:
        self._begun["stall", call] = Span("stall", None, None, f"stall: {call}", begin, inf, {"missing": missing})

    def on_no_tick_ended(self, e: event_file.NoTickEnded) -> None:
        self._ends("stall", "no tick", e["time"], end=e["reason"])

    def on_stall_ended(self, e: event_file.StallEnded) -> None:
        self._ends("stall", e["call"], e["time"], end=e["reason"])

    def on_divergence(self, e: event_file.Divergence) -> None:
        self._mark(e, "warning", e["text"])

    def on_divergent_value(self, e: event_file.DivergentValue) -> None:
        self._mark(e, "warning", f"the first value that differs is {e['value']!r}", commit=e["commit"])

    def on_host_added(self, e: event_file.HostAdded) -> None:
        self._mark(e, "host", f"host {e['host']} added", slots=e["slots"])

    def on_host_removed(self, e: event_file.HostRemoved) -> None:
        self._ends("drain", e["host"], e["time"])
        self._mark(e, "host", f"host {e['host']} removed")

    def on_host_draining(self, e: event_file.HostDraining) -> None:
        host = e["host"]
        span = Span("drain", host, None, f"drain of {host}", e["time"], inf, {"reason": e["reason"]})
        self._begun.setdefault(("drain", host), span)

    def on_host_cooldown(self, e: event_file.HostCooldown) -> None:
        self._ends("drain", e["host"], e["time"])
        host, end = e["host"], e["time"] + e["seconds"]
        self._ends("cooldown", host, e["time"])
        span = Span("cooldown", host, None, f"cooldown of {host}", e["time"], end, {"reason": e["reason"]})
        self._begun["cooldown", host] = span

    def on_agent_joined(self, e: event_file.AgentJoined) -> None:
        self._mark(e, "agent", f"agent of {e['host']} joined")

    def on_agent_lost(self, e: event_file.AgentLost) -> None:
        self._ends("drain", e["host"], e["time"])
        self._mark(e, "agent", f"agent of {e['host']} lost", reason=e["reason"])

    def on_link_cut(self, e: event_file.LinkCut) -> None:
        self._mark(e, "host", f"host {e['host']} gets no answer from host {e['peer']}")

    def on_link_restored(self, e: event_file.LinkRestored) -> None:
        self._mark(e, "host", f"host {e['host']} reaches host {e['peer']} again", seconds=e["seconds"])

    def _ends(self, kind: str, key: str, time: float, **details: object) -> None:
        span = self._begun.pop((kind, key), None)
        if span is not None:
            details = span.details | details
            self._span(kind, span.host, span.name, span.begin, min(span.end, time), details)

    def on_worker_ready(self, e: event_file.WorkerReady) -> None:
        newest = self._newest
        if newest is not None and newest.end_tick is not None and newest.last_tick is None:
            newest.last_tick = e["time"]

    def on_worker_exited(self, e: event_file.WorkerExited) -> None:
        failure = self._workers.exited(e)
        if failure is not None:
            rank = "" if failure.rank is None else f" (rank {failure.rank})"
            name = f"{failure.host}:{failure.slot}{rank} failed: {failure.how}"
            self.marks.append(JobMark(failure.time, "failure", failure.host, name, {}))

    def on_hold(self, e: event_file.Hold) -> None:
        self._begun["hold", ""] = Span("hold", None, None, f"hold: {e['cause']}", e["time"], inf, {})

    def on_release(self, e: event_file.Release) -> None:
        self._ends("hold", "", e["time"], released=e["cause"])

    def on_end(self, e: event_file.End) -> None:
        self._ends("hold", "", e["time"])
        newest, tick = self._newest, e["at"] if isinstance(e["at"], int) else None
        planned = tick is not None or bool(e.get("planned"))  # in a world of workers without run: at no tick
        if newest is not None:
            if newest.end_decided is None:
                newest.end_decided = e["time"]
            newest.end_cause, newest.end_tick, newest.end_planned = e["cause"], tick, planned
        if not planned:
            self._workers.generation_failed(e)
            self._mark(e, "failure", f"generation {e['generation']} failed: {e['cause']}")
        else:
            self._mark(e, "interrupt", f"generation {e['generation']} interrupted: {e['cause']}", tick=tick)

    def on_world_formed(self, e: event_file.WorldFormed) -> None:
        before = self._newest
        cause, planned = ("", False) if before is None else (before.end_cause, before.end_planned)
        if before is not None:
            before.ended = e["time"]
            since = before.end_decided
            if since is not None:
                self._span("waiting", None, "regroup: wait for all members", since, e["time"], {})
        world = (e["size"], e["hosts"], e["joined"], e["left"])
        self.generations.append(GenerationHistory(e["generation"], e["time"], *world, cause, planned))
        self.sizes.append((e["time"], e["size"]))

    def on_sync(self, e: event_file.Sync) -> None:
        self.syncs.append(e)

    def on_training_resumed(self, e: event_file.TrainingResumed) -> None:
        newest = self._newest
        if newest is None:
            return
        newest.resumed, newest.downtime_s = e["time"], e["downtime_s"]
        newest.ticks_lost = e["ticks_lost"]
        newest.lower_bounds = tuple(e["lower_bounds"])
        losses = {name: e[name] for name in ("downtime_s", "ticks_lost", "commits_lost")}
        self._span("formation", None, "world formation, sync, first tick", newest.formed, e["time"], {})
        self._span("downtime", None, "downtime", e["time"] - (e["downtime_s"] or 0.0), e["time"], losses)

    def on_generation_finished(self, e: event_file.GenerationFinished) -> None:
        shares = shares_of(e)
        if shares is not None:
            self._wall_s += shares.wall_s
            self._kept_s += shares.parts["goodput"] - (number(e, "redone_earlier_s") or 0.0)
            if self._wall_s > 0:
                self.goodput.append((e["time"], max(0.0, self._kept_s / self._wall_s)))

    def _span(self, kind: str, host: str | None, name: str, begin: float, end: float, details: Details) -> None:
        begin = max(begin, self.began)
        self.spans.append(Span(kind, host, None, name, begin, max(begin, end), details))

    def _mark(self, e: Any, kind: str, name: str, **details: object) -> None:
        self.marks.append(JobMark(e["time"], kind, e.get("host"), name, details))


def histories(
    path: str, events: Iterable[Event], sink: Callable[[Event], Sink] = lambda first: lambda span: None
) -> list[JobHistory]:
    """Return the histories of all runs of jobs in a file, by their beginning.

    ``sink``: called with the first event of each run; returns the receiver of its workers' spans.
    """
    return runs_of(events, lambda first: JobHistory(first["job"], path, first["time"], sink(first)))


# --------------------------------------------------------------------------------------------------------------- shares
# Accounts of time for the report: the event's own account, or what older events have.


def parts_of(run: JobHistory) -> Shares | None:
    """Return the account of a finished job; None without one. Without an account in the event, the parts are goodput,
    downtime and other time."""
    e = run.finished
    if e is None:
        return None
    found = shares_of(e)
    share = number(e, "goodput")
    if found is not None or share is None:
        return found
    wall_s = e["time"] - run.began
    goodput, downtime = share * wall_s, e["downtime_s"] or 0.0
    parts = {"goodput": goodput, "downtime": downtime, "other": max(0.0, wall_s - goodput - downtime)}
    return Shares(wall_s, parts)


def share_names(accounts: Iterable[Shares]) -> list[str]:
    """Return the names of all parts: goodput, then the causes of badput, the largest first."""
    sums: dict[str, float] = {}
    for account in accounts:
        for name, seconds in account.parts.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sorted(sums, key=lambda name: (name != "goodput", -sums[name]))
