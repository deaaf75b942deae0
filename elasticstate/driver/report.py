"""Report of a job: lines for people, the event file for programs, the summary at the end, and ``launch()``'s result."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import msgspec

from elasticstate.core import divergence, event_file, links
from elasticstate.core.figures import JobFigures, losses_text
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.state import Membership, by_discovery
from elasticstate.core.types import RootCause, Shards, listed, number_of, ranks_text
from elasticstate.driver.job import FAILED, OWN_ERROR, JobState, Outcome
from elasticstate.driver.record import RecordOverview
from elasticstate.driver.status import CopyTotals
from elasticstate.errors import OptionError
from elasticstate.failures import NO_GROUP_HINT, NO_WORLD_HINT, OUT_OF_MEMORY, WorkerFailure, status_of
from elasticstate.machine import format_bytes
from elasticstate.net import messages
from elasticstate.options import Options
from elasticstate.private import make_file, open_directory, write_file
from elasticstate.terminal import message
from elasticstate.threads import in_thread
from elasticstate.writing import Writer

if TYPE_CHECKING:
    from elasticstate.driver.dashboard.server import Dashboard

Fields = Mapping[str, Any]

_MOST_FAILURES = 1000  # limit of the failures that are kept
_MOST_EVENTS_BYTES = 16 << 20  # limit of the events that are kept while the event file cannot be written
_SHOWN = 8  # workers or hosts in one line
_WORLD_HELD_S = 5.0  # longest time that the line of a world is held, so that it can have the costs of the change


def _slot_name(worker: str) -> str:
    return worker.partition("#")[0]


class Report:
    """Writer of log lines and events. Call ``event`` for each event, then ``summary`` once.

    Raises OptionError if the event file cannot be opened.
    """

    def __init__(self, job: str, events_file: str | None, verbose: bool) -> None:
        self._job = job
        self._verbose = verbose
        self._ends: dict[str, str] = {}  # how workers ended unexpectedly, since the last world
        self._expected: set[str] = set()  # workers whose end is no failure
        self._advised: set[str] = set()  # hints that were logged
        self.failures: list[WorkerFailure] = []  # the first failures of workers
        self._world = ""  # log line of a world in which training has not resumed yet
        self._has_world = False  # a world has been formed
        self.due_at = inf  # when this line is written without the costs, on the monotonic clock
        self._reason = ""
        self.terminal = Writer(2)
        self._watcher: Dashboard | None = None
        self._events: Writer | None = None
        self.writers = {"stderr": [self.terminal]}
        if events_file:
            self._events = _open_events(events_file)
            self.writers[f"--events-file {events_file}"] = [self._events]
        self._lines: dict[str, Callable[[Any], str]] = {
            "job_started": lambda f: f"job {self._job} started: {_size(f)}",
            "host_added": lambda f: f"host {f['host']} added: {number_of(f['slots'], 'slot')}",
            "host_removed": lambda f: f"host {f['host']} removed by discovery",
            "host_draining": lambda f: f"host {f['host']} drains: preemption notice: {f['reason']}",
            "host_cooldown": lambda f: f"host {f['host']} is in cooldown for {f['seconds']:.1f} s: {f['reason']}",
            "link_cut": lambda f: links.text_of((f["host"], f["peer"])),
            "link_restored": lambda f: f"host {f['host']} reaches host {f['peer']} again after {f['seconds']:.1f} s",
            "agent_lost": lambda f: f"host {f['host']} lost: its agent {f['reason']}",
            "worker_exited": self._worker_exited,
            "end": _failed_attempt,
            "worker_unresponsive": lambda f: f"{_slot_name(f['worker'])} is unresponsive: {f['reason']}",
            "waiting": _waiting,
            "stall": _stall,
            "stall_ended": lambda f: f"stall ended after {f['seconds']:.1f} s: {f['reason']}: {f['call']}",
            "straggler": _straggler,
            "hang": _hang,
            "no_tick": lambda f: f"warning: {f['text']}",
            # the other ends of a standstill have lines of their own
            "no_tick_ended": lambda f: f["goes_on"] and f"{f['reason']} after {f['seconds']:.0f} s without a tick",
            "straggler_ended": lambda f: f"straggler {_slot_name(f['worker'])} (rank {f['rank']}): {f['reason']}",
            "divergence": lambda f: f"warning: {f['text']}. {divergence.CAUSES}",
            "divergent_value": _divergent_value,
            "driver_restarted": _driver_restarted,
            "record_kept": lambda f: RecordOverview(tuple(f["hosts"]), tuple(f["standbys"])).line(),
            "durable_copy": _durable_copy,
            "warning": lambda f: f"warning: {f['text']}",
            "world_formed": self._world_formed,
            "training_resumed": self._training_resumed,
        }

    def watch(self, watcher: Dashboard) -> None:
        """Call the watcher for each event, failure of a worker, and log line from now on."""
        self._watcher = watcher

    # --------------------------------------------------------------------------------------------------- the events

    def started(self, options: Options, has_one_thread_each: bool, at: float) -> None:
        """Write that the job has started, at this time of the monotonic clock."""
        started = event_file.JobStarted(
            generation=0,
            pid=os.getpid(),
            command=list(options.command),
            np=options.np,
            min_np=options.min_np,
            max_np=options.max_np,
            np_multiple=options.np_multiple,
        )
        self.event("job_started", started, at)
        if has_one_thread_each:
            self.log("OMP_NUM_THREADS is set to 1 for each worker, because several workers may share a machine")

    def event(self, name: str, fields: Fields, at: float | None = None) -> None:
        """Write an event to the event file, and a log line if the event has one.

        ``at``: time of the event on the monotonic clock; None: now.
        """
        ago_s = 0.0 if at is None else time.monotonic() - at
        unix = round(time.time() - ago_s, 6)
        self._write({"time": unix, "event": name, "job": self._job, **fields})
        if self._watcher is not None:
            self._watcher.event(name, fields, unix)
        if name in self._lines:
            text = self._lines[name](fields)
            if text:
                self.log(text)
        elif self._verbose and name != "root_cause":
            self.log(" ".join([name, *(f"{key}={value}" for key, value in fields.items())]))

    def look(self, now: float) -> None:
        """Write the line of a world that has been held for too long: its first tick takes long, or it has no ticks."""
        if self._world and now >= self.due_at:
            self.log(self._forget_world())

    def _forget_world(self) -> str:
        """Return the line of a world that is held, or ""; it is held no longer."""
        line, self._world, self.due_at = self._world, "", inf
        return line

    def reason(self, reason: str) -> None:
        """Log why the core acts or waits: only with ``--verbose``, and only when the reason changes."""
        if self._verbose and reason and reason != self._reason:
            self._reason = reason
            self.log(f"reason: {reason}")

    def expect_end(self, worker: WorkerId) -> None:
        """Expect the end of a worker that was asked to leave: however it ends, its end is no failure."""
        self._expected.add(str(worker))

    def log(self, text: str) -> None:
        """Write a log line, now or as soon as the terminal can be written."""
        self.terminal.put(message("elasticrun", text).encode(errors="replace"))
        if self._watcher is not None:
            self._watcher.line(text, time.time())

    def _worker_exited(self, f: event_file.WorkerExited) -> str:
        how = status_of(f["exit_code"], f["signal"])
        if not f.get("expected"):  # else it has left, after a drain for example
            self._ends[f["worker"]] = how
        expected = f.get("expected") or f["exit_code"] == 0 or f["worker"] in self._expected
        self._expected.discard(f["worker"])
        if not expected and len(self.failures) < _MOST_FAILURES:
            self.failures.append(_failure(f, how))
        if not expected and self._watcher is not None:
            self._watcher.failure(_failure(f, how), time.time())
        if expected and not self._verbose:
            return ""
        rank = f" (rank {f['rank']})" if f["rank"] is not None else ""
        why = [f": {line}" for line in str(f["error"]).splitlines() if line.startswith(OUT_OF_MEMORY)]
        why = why if f["signal"] is not None else self._advice(f)
        return f"{_slot_name(f['worker'])}{rank} ended: {how}{why[-1] if why else ''}"

    def _advice(self, f: event_file.WorkerExited) -> list[str]:
        """Return what a new worker of a running job lacks, once: the job goes on, so no root cause says it."""
        found = [
            hint for hint in (NO_WORLD_HINT, NO_GROUP_HINT) if hint in str(f["error"]) and hint not in self._advised
        ]
        if not self._has_world:
            return []
        self._advised.update(found)
        return [f":\n{hint}" for hint in found]

    def _world_formed(self, f: event_file.WorldFormed) -> str:
        self._has_world = True
        last = self._forget_world()
        first = f["generation"] <= 1
        text = f"generation {f['generation']}: {number_of(f['size'], 'worker')} on {number_of(f['hosts'], 'host')}"
        if not first:
            lost = [f"{_slot_name(w)} ({self._ends[w]})" for w in f["left"] if w in self._ends]
            left = [_slot_name(w) for w in f["left"] if w not in self._ends]
            changes = (("lost", lost), ("left", left), ("joined", [_slot_name(w) for w in f["joined"]]))
            text += "".join(f"; {what}: {listed(who, shown=_SHOWN)}" for what, who in changes if who)
        self._ends.clear()
        if first or f.get("plain"):  # they have no ticks
            return text
        self._world, self.due_at = text, time.monotonic() + _WORLD_HELD_S
        return last

    def _training_resumed(self, f: event_file.TrainingResumed) -> str:
        text = self._forget_world() or f"generation {f['generation']}"
        return f"{text}; training resumed after {losses_text(f)}"

    # ------------------------------------------------------------------------------------------------------ the end

    def summary(
        self,
        figures: JobFigures,
        outcome: Outcome,
        driver: int = 1,
        unsaved: CommitId | None = None,
        should_train: bool = False,
    ) -> None:
        """Write the event job_finished, and the summary to the log.

        ``driver``: number of this driver. ``unsaved``: the last commit, if it is in no durable copy but should be.
        ``should_train``: there are several workers, which usually train together.
        """
        if line := self._forget_world():
            self.log(line)
        status = {0: "succeeded", FAILED: "failed", OWN_ERROR: "failed"}.get(outcome.status, "stopped")
        generation, fields = figures.generations, figures.fields()
        self.event(
            "job_finished", event_file.JobFinished(generation=generation, status=status, driver=driver, **fields)
        )
        text = f"job {self._job} {outcome.word} after {figures.wall_s:.1f} s"
        if figures.generations:
            text += f": {figures.text()}"
        elif outcome.status == 0 and should_train:
            text += ". Each worker ran by itself: none called a function decorated with elasticstate.run, or "
            text += "init_process_group()"
        if driver > 1:
            text += f"; {driver} drivers"
        if unsaved is not None:
            text += f"; the last commit, {unsaved}, is not saved"
        self.log(text)

    def root_cause(self, cause: RootCause) -> None:
        """Log the root cause of a job that failed."""
        failure = failure_of(cause)
        self.log(f"root cause: {failure.reason}")
        for line in failure.details():
            self.log(f"  {line}")

    async def close(self, timeout_s: float) -> None:
        """Wait until all is written; at most ``timeout_s`` for each output that is blocked."""
        for writers in self.writers.values():
            for writer in writers:
                writer.close()
                await writer.flushed(timeout_s)

    def _write(self, line: Fields) -> None:
        if self._events is not None:
            self._events.put(json.dumps(line, default=str).encode() + b"\n")


P = ParamSpec("P")


class Journal:
    """Writer of events, with the facts that the core does not keep: process ids, and the errors that ended workers."""

    def __init__(self, report: Report, state: JobState) -> None:
        self._report = report
        self._state = state
        self._agents: dict[str, int | None] = {}  # process ids, by host
        self._workers: dict[str, int] = {}  # process ids, by the names of workers in the event file
        self._exits: dict[str, messages.WorkerExited] = {}  # of workers whose exit the core has not reported yet
        self._warned: set[str] = set()  # warnings of agents that were written

    def agent_joined(self, host: str, pid: int | None) -> None:
        self._agents[host] = pid

    def worker_lives(self, worker: WorkerId, pid: int) -> None:
        self._workers[str(worker)] = pid

    def worker_exited(self, exited: messages.WorkerExited) -> None:
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


def _open_events(path: str) -> Writer:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OptionError(
            f"--events-file: {path!r}: cannot be written ({error.strerror}). Give a path that this user can write to."
        ) from None
    return Writer(lambda: fd, _MOST_EVENTS_BYTES)


def failure_of(cause: RootCause) -> WorkerFailure:
    """Convert a root cause to the failure that ``launch()`` reports."""
    host, slot = cause.worker.slot_id if cause.worker is not None else (None, None)
    return WorkerFailure(
        cause.reason,
        host,
        slot,
        cause.rank,
        cause.generation,
        cause.exit_code,
        cause.signal,
        cause.error,
        cause.time_ns,
    )


def _size(f: event_file.JobStarted) -> str:
    most = "any number" if f["max_np"] is None else f["max_np"]
    few = f" ({f['min_np']} to {most})" if (f["min_np"], f["max_np"]) != (f["np"], f["np"]) else ""
    return f"{number_of(f['np'], 'worker')}{few}"


def _failure(f: event_file.WorkerExited, how: str) -> WorkerFailure:
    reason = f"{_slot_name(f['worker'])} ended: {how}"
    places = (f["host"], f["slot"], f["rank"], f["generation"])
    return WorkerFailure(reason, *places, f["exit_code"], f["signal"], f["error"], f["time_ns"])


def _waiting(f: event_file.Waiting) -> str:
    remedy = f". {f['remedy']}" if "remedy" in f else ""
    return f"waiting for {f['for']}; missing: {f['who']}{remedy}"


def _failed_attempt(f: event_file.End) -> str:
    """Return the line of a failed attempt to run a script without ``run``."""
    if "attempt" not in f:
        return ""
    limit = "" if f["attempts"] is None else f" of {f['attempts']}"
    return f"attempt {f['attempt']}{limit} failed: {f['cause']}{': ' + f['error'] if f['error'] else ''}"


def _stall(f: event_file.Stall) -> str:
    ranks = ranks_text(f["waiting"])
    return f"stall: {ranks} have waited for up to {f['seconds']:.1f} s in {f['call']}; missing: {f['who']}"


def _hang(f: event_file.Hang) -> str:
    stacks = [
        f"rank {rank} is in {f['lines'][rank] or _innermost(stack)}" for rank, stack in f["stacks"].items() if stack
    ]
    return "; ".join([f"generation {f['ended']} hung: {f['text']}", *stacks[:_SHOWN]])


def _innermost(stack: str) -> str:
    """Return the last frame of a stack."""
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return frames[-1] if frames else stack


def _straggler(f: event_file.Straggler) -> str:
    who = f"{_slot_name(f['worker'])} (rank {f['rank']})"
    return f"straggler: {who} took {f['factor']:.2f} times the own time of the others in the last {f['ticks']} ticks"


def _divergent_value(f: event_file.DivergentValue) -> str:
    commit = CommitId(*f["commit"])
    return f"warning: the first value that differs is {f['value']!r}, in commit {commit}"


def _durable_copy(f: event_file.DurableCopy) -> str:
    """Return a line for the first copy after failures; the driver warns of these."""
    if f["state"] == "failed" or not f["failures"]:
        return ""
    size = format_bytes(f["bytes"])
    return f"durable copy {f['folder']} was saved ({size}), after {number_of(f['failures'], 'failure')} in a row"


def _driver_restarted(f: event_file.DriverRestarted) -> str:
    lost = f"; lost hosts: {listed(f['lost'], shown=_SHOWN)}" if f["lost"] else ""
    back = listed(f["back"], shown=_SHOWN) or "none"
    return f"driver {f['epoch']} reattached in generation {f['generation']}; connected hosts: {back}{lost}"


# ----------------------------------------------------------------------------------------------------- replication sums
# Replication in the event file: one event, _INTERVAL_S after the end of the first replication that it counts. By then
# the agents have reported the bytes that they have sent.


_INTERVAL_S = 10.0


@dataclass(slots=True)
class _Sums:
    """Replications since the last event."""

    first_end: float | None = None  # None: none has ended
    replicated: int = 0
    failed: int = 0
    reason: str = ""  # of the last that failed
    seconds: float = 0.0  # in which one was in progress
    age_s: float = 0.0  # the greatest


class ReplicationSums:
    """Sums of the replications of a job. ``shards``: before the first step of this driver."""

    def __init__(self, shards: Shards, totals: CopyTotals) -> None:
        self._last = shards
        self._totals = totals
        self._sent_bytes = totals.sent_bytes
        self._newest_since: float | None = None  # begin of the replication of the newest replicated commit
        self._counted_until = -inf  # the time in which a replication was in progress
        self._sums = _Sums()

    def look(self, shards: Shards, now: float) -> event_file.Replication | None:
        """Follow a step of the core. Return an event if one is due."""
        last, self._last = self._last, shards
        if shards is not last:
            self._follow(last, shards, now)
        first = self._sums.first_end
        return self.rest(now) if first is not None and now >= first + _INTERVAL_S else None

    def rest(self, now: float) -> event_file.Replication | None:
        """Return an event now; None: no replication has ended since the last one."""
        sums, shards, sent = self._sums, self._last, self._totals.sent_bytes
        if sums.first_end is None:
            return None
        if shards.replication is not None:  # some of its bytes are sent
            self._count(shards.replication.since, now)
        self._sums, before, self._sent_bytes = _Sums(), self._sent_bytes, sent
        event: event_file.Replication = {
            "commit": None if shards.replicated is None else list(shards.replicated),
            "age_s": None if self._newest_since is None else round(max(sums.age_s, now - self._newest_since), 6),
            "replicated": sums.replicated,
            "failed": sums.failed,
            "seconds": round(sums.seconds, 6),
            "bytes": sent - before,
            "memory_bytes": sum(self._totals.memory().values()),
        }
        return {**event, "reason": sums.reason} if sums.failed else event

    def _follow(self, last: Shards, shards: Shards, now: float) -> None:
        is_done = shards.replicated != last.replicated and shards.replicated is not None
        failed = max(0, shards.failures - (0 if is_done else last.failures))
        if not is_done and not failed:
            return
        sums, since = self._sums, now if last.replication is None else last.replication.since
        sums.first_end = now if sums.first_end is None else sums.first_end
        self._count(since, now)
        if is_done:
            if self._newest_since is not None:
                sums.age_s = max(sums.age_s, now - self._newest_since)
            sums.replicated, self._newest_since = sums.replicated + 1, since
        if failed:
            sums.failed, sums.reason = sums.failed + failed, shards.trouble

    def _count(self, since: float, now: float) -> None:
        self._sums.seconds += now - max(since, self._counted_until)
        self._counted_until = now


# ------------------------------------------------------------------------------------------------------- launch results
# Launch result: the outcome of the job, and the function's result on each rank, for the caller of ``launch()``.
#
# ::
#
#     DIRECTORY/options      written by launch(): all that the driver needs to know
#     DIRECTORY/call         the function and its arguments, for the workers
#     DIRECTORY/0.result     result of rank 0 of the last world; no file: nothing was returned
#     DIRECTORY/outcome      written last


OUTCOME_FILE = "outcome"
CALL_FILE = "call"  # as worker/call.py reads it


def function_to_call(options: Options) -> bytes:
    """Return the function that ``launch()`` has written for its workers; empty if they run a command."""
    path = Path(options.call_directory or "", CALL_FILE)
    return path.read_bytes() if options.call_directory is not None and path.exists() else b""


class LaunchOutcome(msgspec.Struct, frozen=True):
    """The outcome, for ``launch()``."""

    status: int  # of elasticrun
    word: str
    ranks: int  # of the last world
    root_cause: WorkerFailure | None
    failures: tuple[WorkerFailure, ...]


def result_name(rank: int) -> str:
    """Return the name of the file with this rank's result."""
    return f"{rank}.result"


def slots_of(m: Membership) -> list[tuple[str, int]]:
    """Return host and slot by rank of the last world; without ``run`` in the order of discovery."""
    if m.world is not None:
        return [(placement.worker.host, placement.worker.slot) for placement in m.world.members]
    order = {host.name: index for index, host in enumerate(by_discovery(m))}
    by_rank = [(slot_id.host, slot_id.slot) for slot_id, slot in m.slots.items() if slot.finished]
    return sorted(by_rank, key=lambda slot_id: (order.get(slot_id[0], len(order)), slot_id))


class LaunchResults:
    """Collects the results. ``send`` requests a part from an agent; ``received`` gets the answer."""

    def __init__(self, directory: str, send: Callable[[str, messages.Fetch], object]) -> None:
        self._directory = directory
        self._send = send
        self._ranks = 0
        self._awaited: dict[str, asyncio.Future[messages.Fetched]] = {}

    def received(self, host: str, part: messages.Fetched) -> None:
        awaited = self._awaited.pop(host, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(part)

    async def fetched(self, outcome: Outcome, m: Membership, patience_s: float) -> Outcome:
        """Fetch all results of a job that has succeeded, from all hosts at once. If that fails, the job has failed.

        ``patience_s``: limit for each part of a result.
        """
        by_rank = slots_of(m)
        self._ranks = len(by_rank)
        if outcome.status != 0:
            return outcome
        hosts: dict[str, list[tuple[int, int]]] = {}
        for rank, (host, slot) in enumerate(by_rank):
            hosts.setdefault(host, []).append((rank, slot))
        try:
            await asyncio.gather(*(self._fetch_from(host, slots, patience_s) for host, slots in hosts.items()))
        except OSError as problem:  # ConnectionError is an OSError
            return Outcome(FAILED, "failed", RootCause(f"could not fetch the results of the workers: {problem}"))
        return outcome

    async def _fetch_from(self, host: str, slots: list[tuple[int, int]], patience_s: float) -> None:
        for rank, slot in slots:
            part = await self._part(host, slot, 0, patience_s)
            if part.size == 0:
                continue
            directory = open_directory(self._directory)
            try:
                fd = make_file(directory, result_name(rank))
            finally:
                os.close(directory)
            with open(fd, "wb") as file:
                while file.tell() < part.size:
                    await in_thread(file.write, part.data)
                    if file.tell() < part.size:
                        part = await self._part(host, slot, file.tell(), patience_s)

    async def _part(self, host: str, slot: int, offset: int, patience_s: float) -> messages.Fetched:
        answer = self._awaited[host] = asyncio.get_running_loop().create_future()
        self._send(host, messages.Fetch(slot, offset))
        await asyncio.wait({answer}, timeout=patience_s)
        if answer.done():
            part: messages.Fetched = answer.result()
            if part.slot == slot and part.offset == offset and (part.data or not part.size):
                return part
        raise ConnectionError(f"host {host} did not send the result of slot {slot}")

    def write(self, outcome: Outcome, failures: Sequence[WorkerFailure]) -> None:
        """Write the outcome, for which ``launch()`` waits. Raises OSError."""
        cause = failure_of(outcome.root_cause) if outcome.root_cause is not None else None
        known = {(end.host, end.slot, end.generation) for end in failures}
        if cause is not None and cause.host is not None and (cause.host, cause.slot, cause.generation) not in known:
            failures = [*failures, cause]  # the job was over before the driver received this worker's end
        launch_outcome = LaunchOutcome(outcome.status, outcome.word, self._ranks, cause, tuple(failures))
        directory = open_directory(self._directory)
        try:
            write_file(directory, OUTCOME_FILE, msgspec.json.encode(launch_outcome))
        finally:
            os.close(directory)
