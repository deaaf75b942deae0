"""Shared by the parts of a driver: the state of its job with readings, the queue of events, tasks, and the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple, ParamSpec

from msgspec.structs import replace

from elasticstate.core import event_file, types as t
from elasticstate.core.ids import WorkerId
from elasticstate.core.policy import Policy
from elasticstate.core.reattach import reattach
from elasticstate.core.sharded import is_sharded
from elasticstate.core.state import Membership
from elasticstate.core.step import new_membership, step
from elasticstate.driver.record import Reattachment, RecordOverview
from elasticstate.driver.report import Outcome, Report
from elasticstate.driver.status import CopyTotals, DurableFigures
from elasticstate.net.messages import MOST_METRICS, HostUse, Stamps, WorkerExited


class JobState:
    """The core's state, why the core acts or waits, and the outcome of the job. Times: the event loop's clock."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.membership = new_membership(policy, now)
        self.reason = ""
        self.outcome: Outcome | None = None  # None: the job is not over
        self.stopped: Outcome | None = None  # the outcome of a job that is being stopped
        self.commit_bytes = 0  # size of a commit of the largest worker; of shards, in the last world that reported it
        self._sized_in = 0  # the generation that reported it
        self.stores: dict[str, str] = {}  # by host: address of the store for the next world of plain workers
        self.copy_servers: dict[str, str] = {}  # by host: address of the copy server
        self.stepped_at = now
        self.committed_at: float | None = None  # when this driver received the newest commit
        self.durable = DurableFigures()
        self.copies = CopyTotals()
        self.readings = Readings()
        self.record: RecordOverview | None = None  # None: no --standbys
        self._policy = policy

    def step(self, event: t.Event, now: float) -> tuple[t.Effect, ...]:
        """Pass an event to the core. Return the effects."""
        self.stepped_at = now
        newest = self.membership.ledger.highest
        self.membership, effects, self.reason = step(self.membership, event, now)
        if self.membership.ledger.highest != newest:
            self.committed_at = now
        return effects

    def record_commit_size(self, size_bytes: int) -> None:
        """Record the size of a worker's commit. Each world has shards of another size."""
        if is_sharded(self.membership) and self._sized_in != self.membership.generation:
            self.commit_bytes = 0
        self._sized_in = self.membership.generation
        self.commit_bytes = max(self.commit_bytes, size_bytes)

    def size_for_newcomers(self) -> int:
        """Return the size of a commit in a world of all living workers, as far as it is known. Shards are taken to be
        distributed evenly."""
        m = self.membership
        if m.world is None or not is_sharded(m):
            return self.commit_bytes
        return -(-self.commit_bytes * m.world.size // max(m.world.size, sum(m.living.values())))

    def reattach(self, reattachment: Reattachment, now: float) -> tuple[t.Effect, ...]:
        """Let the core continue the job of an earlier driver. Return the effects."""
        self.stepped_at = now
        self.membership, effects, self.reason = reattach(self._policy, reattachment.remains((now, time.time())), now)
        return effects


_DELAY_PER_WORKER_S = 1e-4  # delay of events that are not urgent
_LONGEST_DELAY_S = 1.0


class EventQueue:
    """Events that the core has not received yet. The main loop waits until it is time to pass them to the core."""

    def __init__(self) -> None:
        self._events: list[t.Event] = []
        self._ready_at: dict[int, float] = {}  # when a READY arrived, by its index
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # for events that can wait

    @property
    def events(self) -> Sequence[t.Event]:
        return self._events

    def post(self, event: t.Event) -> None:
        """Add an event that the core must receive at once."""
        if isinstance(event, t.FromWorker) and isinstance(event.body, t.Ready):
            self._ready_at[len(self._events)] = asyncio.get_running_loop().time()
        self._events.append(event)
        self.wake()

    def post_later(self, events: Iterable[t.Event], workers: int) -> None:
        """Add events that can wait, so that the core receives several at once.

        A step of the core takes time for each of the job's ``workers``.
        """
        self._events += events
        if self._timer is None:
            delay_s = min(_LONGEST_DELAY_S, _DELAY_PER_WORKER_S * workers)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.wake)

    def wake(self) -> None:
        """End the present or next call of ``wait``."""
        self._is_due.set()

    async def wait(self, deadline: float | None) -> None:
        """Wait for events, a call of ``wake``, or the deadline on the event loop's clock."""
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self.wake)
        await self._is_due.wait()
        self._is_due.clear()
        if timer is not None:
            timer.cancel()

    def take(self) -> list[t.Event]:
        """Remove all events, and return them in their order. READY names the present length of the worker's pause.

        A driver that reattaches waits for its agents, for a limited time, before it takes their first events.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._events = self._events, []
        ready_at, self._ready_at = self._ready_at, {}
        now = asyncio.get_running_loop().time()
        for index, at in ready_at.items():
            event = events[index]
            assert isinstance(event, t.FromWorker)
            assert isinstance(event.body, t.Ready)
            events[index] = replace(event, body=replace(event.body, paused_s=event.body.paused_s + now - at))
        return events


class BackgroundTasks:
    """Tasks of one owner. ``wake`` is called when one has failed; then ``check`` raises its error."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._tasks: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._wake()

    def check(self) -> None:
        """Raise the error of a task: a driver that no longer watches its agents must not continue."""
        if self._error is not None:
            raise self._error


P = ParamSpec("P")


class Journal:
    """Writer of events, with the facts that the core does not keep: process ids, and the errors that ended workers."""

    def __init__(self, report: Report, state: JobState) -> None:
        self._report = report
        self._state = state
        self._agents: dict[str, int | None] = {}  # process ids, by host
        self._workers: dict[str, int] = {}  # process ids, by the names of workers in the event file
        self._exits: dict[str, WorkerExited] = {}  # of workers whose exit the core has not reported yet
        self._warned: set[str] = set()  # warnings of agents that were written

    def agent_joined(self, host: str, pid: int | None) -> None:
        self._agents[host] = pid

    def worker_lives(self, worker: WorkerId, pid: int) -> None:
        self._workers[str(worker)] = pid

    def worker_exited(self, exited: WorkerExited) -> None:
        self._workers[str(exited.worker)], self._exits[str(exited.worker)] = exited.pid, exited

    def core_event(self, name: str, fields: Any) -> None:
        """Write an event of the core, with the time of the core's last step."""
        if name == "agent_joined":
            joined: event_file.AgentJoined = fields
            joined["pid"] = self._agents.get(joined["host"])
        elif name == "worker_exited":
            ended: event_file.WorkerExited = fields
            exited = self._exits.pop(ended["worker"], None)
            ended["pid"] = self._workers.pop(ended["worker"], None)
            ended["error"], ended["time_ns"] = (exited.error, exited.time_ns) if exited is not None else ("", 0)
        self._report.event(name, fields, self._state.stepped_at)

    def event(self, event: Callable[P, event_file.CommonFields], /, *args: P.args, **fields: P.kwargs) -> None:
        """Write an event of the driver."""
        name, generation = event_file.name_of(event), self._state.membership.generation
        self._report.event(name, {"generation": generation, **fields})

    def warn(self, text: str) -> None:
        self.event(event_file.Warning, text=text)

    def agent_warning(self, host: str, text: str) -> None:
        """Write a warning of an agent. The same warning on a thousand hosts is logged once."""
        if text not in self._warned:
            self._warned.add(text)
            self.warn(f"host {host}: {text} (logged for the first host only)")


# ------------------------------------------------------------------------------------------------------------- readings
# The newest values that scripts have reported with ``report_metric``, and the use of the hosts.


_MANY_VALUES = 10_000
_VALUES_PER_S = 100_000  # limit of the values that are looked at, if there are many


class Metric(NamedTuple):
    """A name's newest value, as the lowest rank among the living workers has reported it, and those of all of them."""

    value: float
    rank: int | None  # None: the worker has no rank yet
    values: tuple[float, ...]


class Readings:
    """Readings of a job. Only the event loop changes them, so any thread may read them."""

    def __init__(self) -> None:
        self.use: dict[str, HostUse] = {}  # by host
        self.arrived: dict[str, float] = {}  # by name: when the newest value arrived, in Unix time
        self._values: dict[str, dict[WorkerId, float]] = {}
        self._last: dict[str, Metric] = {}
        self._has_refused = False
        self._changes = 0  # of the values
        self._made_of: tuple[int, object] = (0, None)  # changes and workers of which ``_last`` was made
        self._made_at = -inf  # monotonic time

    def update(self, host: str, message: Stamps, m: Membership, at: float) -> str:
        """Enter what an agent has sent. Return the first name of all for which there is no place, once, or ""."""
        if message.use is not None:
            self.use[host] = message.use
        refused = ""
        for worker, values in message.metrics:
            for name, value in values:
                if name not in self._values and len(self._values) >= MOST_METRICS:
                    refused = refused or ("" if self._has_refused else name)
                    self._has_refused = True
                    continue
                known = self._values.setdefault(name, {})
                if worker not in known and len(known) > len(m.workers):
                    known = self._values[name] = {w: v for w, v in known.items() if w in m.workers}
                known[worker] = value
                self.arrived[name] = at
                self._changes += 1
        return refused

    def host_lost(self, host: str) -> None:
        self.use.pop(host, None)

    def metrics(self, m: Membership) -> dict[str, Metric]:
        """Return the newest values by name. A name without a living worker keeps its last one.

        With very many values the answer may be a few seconds old.
        """
        number, now = sum(map(len, list(self._values.values()))), time.monotonic()
        changes, workers = self._made_of
        is_same = changes == self._changes and workers is m.workers
        if is_same or (number > _MANY_VALUES and now < self._made_at + number / _VALUES_PER_S):
            return dict(self._last)
        self._made_of, self._made_at = (self._changes, m.workers), now
        for name, values in list(self._values.items()):
            found = [(_rank(m, worker), worker, value) for worker, value in dict(values).items() if worker in m.workers]
            if found:
                _, worker, value = min(found)
                self._last[name] = Metric(value, m.workers[worker].rank, tuple(value for _, _, value in found))
        return dict(self._last)


def _rank(m: Membership, worker: WorkerId) -> float:
    rank = m.workers[worker].rank
    return inf if rank is None else rank


def shown(value: float) -> float | str:
    """Return a value for JSON, which has no NaN and no infinity."""
    return value if isfinite(value) else "NaN" if value != value else "infinity" if value > 0 else "-infinity"
