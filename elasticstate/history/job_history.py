"""History of one run of a job, made from its events in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticstate.history.copies import CopiesHistory
from elasticstate.history.event_files import Event, number
from elasticstate.history.worker_spans import Details, Sink, WorkerFailed, WorkerSpans

_NO_TICK = "no tick"


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
    commits_lost: int = 0
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


class JobSpan(NamedTuple):
    """Span of the job or of a host."""

    kind: str  # hold, change, waiting, formation, downtime, drain, cooldown, stall or driver
    host: str | None
    name: str
    begin: float
    end: float
    details: Details


class JobMark(NamedTuple):
    """Something that happened at one time."""

    time: float
    kind: str  # failure, interrupt, host, agent, driver or job
    host: str | None
    name: str
    details: Details


class Shares(NamedTuple):
    """Account of some time: seconds by part, with the part ``goodput`` first."""

    wall_s: float
    parts: dict[str, float]


def shares_of(event: Event) -> Shares | None:
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
    started: Event | None = None
    finished: Event | None = None
    root_cause: Event | None = None
    drivers: int = 1
    generations: list[GenerationHistory] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    spans: list[JobSpan] = field(default_factory=list)
    marks: list[JobMark] = field(default_factory=list)
    failures: list[WorkerFailed] = field(default_factory=list)
    goodput: list[tuple[float, float]] = field(default_factory=list)  # time, share since the start
    syncs: int = 0
    sync_bytes: int = 0
    sync_seconds: float = 0.0
    copies: CopiesHistory = field(default_factory=CopiesHistory)
    warnings: int = 0
    _workers: WorkerSpans = field(init=False)
    _handlers: dict[str, Callable[[Event], None]] = field(init=False)
    _hold: tuple[float, str] | None = None
    _drains: dict[str, tuple[float, str]] = field(default_factory=dict)
    _cooldowns: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    _stalls: dict[str, Event] = field(default_factory=dict)
    _kept_s: float = 0.0  # goodput of the generations so far
    _wall_s: float = 0.0  # time of the generations so far

    def __post_init__(self) -> None:
        self.last = self.began
        self._workers = WorkerSpans(self.sink, self.failures)
        workers = self._workers
        self._handlers = {
            "job_started": self._job_started,
            "job_finished": self._job_finished,
            "root_cause": self._root_cause,
            "driver_restarted": self._driver_restarted,
            "warning": self._warning,
            "stall": self._stall,
            "no_tick": self._no_tick,
            "no_tick_ended": lambda e: self._stall_ends(_NO_TICK, e["time"], e["reason"]),
            "stall_ended": self._stall_ended,
            "host_added": self._host_added,
            "host_removed": self._host_removed,
            "host_draining": self._host_draining,
            "host_cooldown": self._host_cooldown,
            "agent_joined": self._agent_joined,
            "agent_lost": self._agent_lost,
            "worker_started": workers.started,
            "worker_ready": self._worker_ready,
            "worker_exited": self._worker_exited,
            "worker_unresponsive": workers.unresponsive,
            "hold": self._held,
            "release": self._released,
            "end": self._end,
            "world_formed": self._world_formed,
            "sync": self._sync,
            "training_resumed": self._training_resumed,
            "generation_finished": self._generation_finished,
            "replication": self.copies.replication,
            "durable_copy": self.copies.durable_copy,
        }

    @property
    def _newest(self) -> GenerationHistory | None:
        return self.generations[-1] if self.generations else None

    def add(self, e: Event) -> None:
        """Add an event. The time of this history never goes back, even if the clock was set back."""
        e["time"] = max(self.last, e["time"])
        handler = self._handlers.get(e["event"])
        if handler is not None:
            handler(e)
        self.last = e["time"]

    def close(self) -> None:
        """End all spans: the file has no further event of this run."""
        if self._newest is not None and self._newest.ended is None:
            self._newest.ended = self.last
        for host in list(self._drains):
            self._drain_ends(host, self.last)
        for host in list(self._cooldowns):
            self._cooldown_ends(host, self.last)
        for call in list(self._stalls):
            self._stall_ends(call, self.last, "the file ends")
        self._workers.close(self.last, "the job ended" if self.finished else "the file ends")
        if self.sizes:
            self.sizes.append((self.last, 0 if self.finished else self.sizes[-1][1]))

    # ------------------------------------------------------------------------------------------------------ the job

    def _job_started(self, e: Event) -> None:
        self.started = e

    def _job_finished(self, e: Event) -> None:
        self.finished = e
        if self._newest is not None:
            self._newest.ended = e["time"]
        share = number(e, "goodput")
        if share is not None:
            self.goodput.append((e["time"], share))
        self._mark(e, "job", f"job {e['status']}", failures=e["failures"], goodput=share)

    def _root_cause(self, e: Event) -> None:
        self.root_cause = e
        self._workers.over()
        self._mark(e, "failure", f"root cause: {e['reason']}")

    def _driver_restarted(self, e: Event) -> None:
        self.drivers = max(self.drivers + 1, e["epoch"])
        self._span("driver", None, f"no event until driver {e['epoch']} reattached", self.last, e["time"], {})
        self._mark(e, "driver", f"driver {e['epoch']} reattached", back=e.get("back"), lost=e.get("lost"))

    def _warning(self, e: Event) -> None:
        self.warnings += 1

    def _stall(self, e: Event) -> None:
        self._stalls[e["call"]] = e

    def _no_tick(self, e: Event) -> None:
        self._stalls[_NO_TICK] = {**e, "who": e["text"]}

    def _stall_ended(self, e: Event) -> None:
        self._stall_ends(e["call"], e["time"], e["reason"])

    def _stall_ends(self, call: str, time: float, reason: str) -> None:
        stall = self._stalls.pop(call, None)
        if stall is not None:
            details = {"missing": stall["who"], "end": reason}
            self._span("stall", None, f"stall: {call}", stall["time"] - stall["seconds"], time, details)

    # ---------------------------------------------------------------------------------------------------- the hosts

    def _host_added(self, e: Event) -> None:
        self._mark(e, "host", f"host {e['host']} added", slots=e["slots"])

    def _host_removed(self, e: Event) -> None:
        self._workers.host_removed(e)
        self._drain_ends(e["host"], e["time"])
        self._mark(e, "host", f"host {e['host']} removed")

    def _host_draining(self, e: Event) -> None:
        self._drains.setdefault(e["host"], (e["time"], e["reason"]))
        self._workers.host_drains(e["host"])

    def _host_cooldown(self, e: Event) -> None:
        self._drain_ends(e["host"], e["time"])
        self._cooldown_ends(e["host"], e["time"])
        self._cooldowns[e["host"]] = (e["time"], e["time"] + e["seconds"], e["reason"])

    def _agent_joined(self, e: Event) -> None:
        self._mark(e, "agent", f"agent of {e['host']} joined")

    def _agent_lost(self, e: Event) -> None:
        self._drain_ends(e["host"], e["time"])
        self._mark(e, "agent", f"agent of {e['host']} lost", reason=e["reason"])

    def _drain_ends(self, host: str, time: float) -> None:
        if host in self._drains:
            begin, reason = self._drains.pop(host)
            self._span("drain", host, f"drain of {host}", begin, time, {"reason": reason})

    def _cooldown_ends(self, host: str, time: float) -> None:
        if host in self._cooldowns:
            begin, end, reason = self._cooldowns.pop(host)
            self._span("cooldown", host, f"cooldown of {host}", begin, min(end, time), {"reason": reason})

    # -------------------------------------------------------------------------------------------------- the workers

    def _worker_ready(self, e: Event) -> None:
        newest = self._newest
        if newest is not None and newest.end_tick is not None and newest.last_tick is None:
            newest.last_tick = e["time"]
        self._workers.ready(e)

    def _worker_exited(self, e: Event) -> None:
        failure = self._workers.exited(e)
        if failure is not None:
            rank = "" if failure.rank is None else f" (rank {failure.rank})"
            name = f"{failure.host}:{failure.slot}{rank} failed: {failure.how}"
            self.marks.append(JobMark(failure.time, "failure", failure.host, name, {}))

    # --------------------------------------------------------------------------------------------------- the worlds

    def _held(self, e: Event) -> None:
        self._hold = (e["time"], e["cause"])

    def _released(self, e: Event) -> None:
        self._hold_ends(e["time"], {"released": e["cause"]})

    def _hold_ends(self, time: float, details: Details) -> None:
        if self._hold is not None:
            begin, cause = self._hold
            self._hold = None
            self._span("hold", None, f"hold: {cause}", begin, time, details)

    def _end(self, e: Event) -> None:
        self._hold_ends(e["time"], {})
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

    def _world_formed(self, e: Event) -> None:
        before = self._newest
        cause, planned = ("", False) if before is None else (before.end_cause, before.end_planned)
        if before is not None:
            before.ended = e["time"]
            since = before.end_decided
            if since is not None:
                self._span("waiting", None, "regroup: wait for all members", since, e["time"], {})
        world = (e["size"], e["hosts"], list(map(str, e["joined"])), list(map(str, e["left"])))
        self.generations.append(GenerationHistory(e["generation"], e["time"], *world, cause, planned))
        self.sizes.append((e["time"], e["size"]))
        self._workers.world_formed(e)

    def _sync(self, e: Event) -> None:
        self.syncs, self.sync_bytes = self.syncs + 1, self.sync_bytes + e["bytes"]
        self.sync_seconds = max(self.sync_seconds, e["seconds"])
        self._workers.synced(e)

    def _training_resumed(self, e: Event) -> None:
        newest = self._newest
        if newest is None:
            return
        newest.resumed, newest.downtime_s = e["time"], e["downtime_s"]
        newest.ticks_lost, newest.commits_lost = e["ticks_lost"], e["commits_lost"]
        newest.lower_bounds = tuple(e["lower_bounds"])
        losses = {name: e[name] for name in ("downtime_s", "ticks_lost", "commits_lost")}
        self._span("formation", None, "world formation, sync, first tick", newest.formed, e["time"], {})
        self._span("downtime", None, "downtime", e["time"] - e["downtime_s"], e["time"], losses)
        self._workers.resumed(e)

    def _generation_finished(self, e: Event) -> None:
        shares = shares_of(e)
        if shares is not None:
            self._wall_s += shares.wall_s
            self._kept_s += shares.parts["goodput"] - (number(e, "redone_earlier_s") or 0.0)
            if self._wall_s > 0:
                self.goodput.append((e["time"], max(0.0, self._kept_s / self._wall_s)))

    def _span(self, kind: str, host: str | None, name: str, begin: float, end: float, details: Details) -> None:
        begin = max(begin, self.began)
        self.spans.append(JobSpan(kind, host, name, begin, max(begin, end), details))

    def _mark(self, e: Event, kind: str, name: str, **details: object) -> None:
        self.marks.append(JobMark(e["time"], kind, e.get("host"), name, details))


def _ignore(span: object) -> None:
    """Drop a span."""


def histories(
    path: str, events: Iterable[Event], sink: Callable[[str], Sink] = lambda job: _ignore
) -> list[JobHistory]:
    """Return the histories of all runs of jobs in a file, by their beginning.

    ``sink``: called with the name of each run; returns the receiver of its workers' spans. A ``job_started`` begins a
    new run; a driver that reattaches continues the run.
    """
    found: list[JobHistory] = []
    newest: dict[str, JobHistory] = {}
    for event in events:
        job = event["job"]
        history = newest.get(job)
        if history is None or event["event"] == "job_started":
            history = JobHistory(job, path, event["time"], sink(job))
            newest[job] = history
            found.append(history)
        history.add(event)
    for history in found:
        history.close()
    return found
