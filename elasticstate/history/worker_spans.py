"""Spans of workers: what each process did from its start to its exit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from signal import SIGTERM
from typing import Any, NamedTuple

from elasticstate.core.assignment import NEWCOMER, assign
from elasticstate.core.ids import WorkerId
from elasticstate.exit_status import status_of
from elasticstate.history.event_files import Event

Details = dict[str, Any]

_NAMES = {"boot": "boot", "ready": "ready, waits for a world", "leaving": "leaves the failed generation"}
_SHORTEST = 1e-6  # seconds of a wait: members are READY as the next world forms


class WorkerSpan(NamedTuple):
    """Span of a slot. A span lies in those that begin before it and end after it."""

    host: str
    slot: int
    kind: str  # worker, boot, ready, generation, formation, sync, leaving or down
    name: str
    begin: float
    end: float
    details: Details


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


Sink = Callable[[WorkerSpan], None]


@dataclass(slots=True)
class WorkerSpans:
    """Tracker of all workers of a job. It passes each span to ``sink`` when the span ends."""

    sink: Sink
    failures: list[WorkerFailed] = field(default_factory=list)
    _lives: dict[str, _Life] = field(default_factory=dict)  # by worker
    _slots: dict[tuple[str, int], _Life] = field(default_factory=dict)
    _down: dict[tuple[str, int], tuple[float, str, Details]] = field(default_factory=dict)  # slots whose worker failed
    _ages: dict[str, int] = field(default_factory=dict)  # of the members of the newest world
    _next_age: int = 0
    _is_whole: bool = False  # all members are known
    _is_over: bool = False

    def started(self, e: Event) -> None:
        place = (e["host"], e["slot"])
        for known in (self._slots.get(place), self._lives.get(e["worker"])):
            if known is not None and known.worker in self._lives:
                self._end(known, e["time"], "its exit was not reported", {})
        self._down_ends(place, e["time"])
        life = _Life(e["worker"], *place, e["time"], e["time"])
        self._lives[e["worker"]] = self._slots[place] = life

    def ready(self, e: Event) -> None:
        life = self._known(e)
        self._enter(life, "ready", e["time"])

    def world_formed(self, e: Event) -> None:
        joined = [str(worker) for worker in e["joined"]]
        for worker in (*map(str, e["left"]), *joined):
            self._ages.pop(worker, None)
        self._is_whole = (self._is_whole or not self._ages) and len(self._ages) + len(joined) == e["size"]
        ranks = self._ranks(joined)
        for worker in self._ages:
            life = self._lives.get(worker)
            if life is not None:
                self._enter(life, "generation", e["time"])
                life.generation, life.rank = e["generation"], ranks.get(worker)
                life.resumed = life.synced = None

    def resumed(self, e: Event) -> None:
        for life in self._living_members():
            life.resumed = max(life.since, e["time"])

    def synced(self, e: Event) -> None:
        life = self._lives.get(e["worker"])
        if life is not None and life.phase == "generation":
            life.synced = (e["time"] - e["seconds"], e["time"], e["bytes"])

    def generation_failed(self, e: Event) -> None:
        for life in self._living_members():
            self._enter(life, "leaving", e["time"])

    def unresponsive(self, e: Event) -> None:
        life = self._lives.get(e["worker"])
        if life is not None:
            life.unresponsive = e["reason"]

    def host_drains(self, host: str) -> None:
        for life in self._lives.values():
            life.draining = life.draining or life.host == host

    def exited(self, e: Event) -> WorkerFailed | None:
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

    def host_removed(self, e: Event) -> None:
        for place in [place for place in self._down if place[0] == e["host"]]:
            self._down_ends(place, e["time"])

    def over(self) -> None:
        """Record that the job ends: the driver now stops the workers, and their ends are no failures."""
        self._is_over = True

    def close(self, time: float, why: str) -> None:
        """End all spans."""
        for life in list(self._lives.values()):
            self._end(life, time, why, {})
        for place in list(self._down):
            self._down_ends(place, time)

    # ---------------------------------------------------------------------------------------------------- the parts

    def _known(self, e: Event) -> _Life:
        """Return the worker of an event. Of a worker without a start (its host was unreachable, or the file begins in
        the middle of the job), the life begins with the event."""
        if e["worker"] not in self._lives:
            self.started(e)
        return self._lives[e["worker"]]

    def _living_members(self) -> Iterable[_Life]:
        found = (self._lives.get(worker) for worker in self._ages)
        return [life for life in found if life is not None and life.phase == "generation"]

    def _ranks(self, joined: list[str]) -> dict[str, int]:
        """Add the members that have ``joined``, in the order of their ranks. Return all ranks, by the rule of the core;
        none if not all members are known."""
        members = [life for worker in (*self._ages, *joined) if (life := self._lives.get(worker)) is not None]
        aged = [(WorkerId(life.host, life.slot, 0), self._ages.get(life.worker, NEWCOMER)) for life in members]
        workers = {(life.host, life.slot): life.worker for life in members}
        placed = [workers[worker.host, worker.slot] for worker in (p.worker for p in assign(aged))]
        newcomers = set(joined)
        for worker in placed:
            if worker in newcomers:
                self._ages[worker], self._next_age = self._next_age, self._next_age + 1
        return {worker: rank for rank, worker in enumerate(placed)} if self._is_whole else {}

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
            self.sink(WorkerSpan(*place, "down", f"exited: {how}", begin, max(begin, time), details))

    def _emit(self, life: _Life, kind: str, name: str, begin: float, end: float, details: Details) -> None:
        self.sink(WorkerSpan(life.host, life.slot, kind, name, begin, end, details))

    def _is_failure(self, life: _Life, e: Event) -> bool:
        """Return True for an end that the driver did not ask for. When it stops the job, the events do not say so:
        workers that boot end by SIGTERM then, and READY workers (spares) end by an exit code."""
        if self._is_over or e.get("expected") or life.draining or e["exit_code"] == 0:
            return False
        is_member = life.phase in ("generation", "leaving")
        return is_member or not (e["signal"] == SIGTERM or (life.phase == "ready" and e["exit_code"] is not None))
