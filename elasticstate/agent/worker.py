"""One worker of an agent: its process, its liveness, and the cause of its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from elasticstate import tracebacks
from elasticstate._native import ControlPage
from elasticstate.agent import exec_shim
from elasticstate.agent.worker_output import Audience, Pump
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import CallReport
from elasticstate.exit_status import NO_GROUP_HINT, NO_WORLD_HINT, OUT_OF_MEMORY
from elasticstate.net import messages
from elasticstate.net.messages import STACKS_SIGNAL, Place, Stamp
from elasticstate.options import inherited_environment, missing_temporary_directory
from elasticstate.processes import CLEANUP_S, catches, descriptors_given, ended_child, kill_session
from elasticstate.threads import in_thread
from elasticstate.tracebacks import WorkerError

# ------------------------------------------------------------------------------------------------------- worker process
# One worker's process: started in a session of its own, watched by pidfd, ended together with its whole session.


_DRAIN_TIMEOUT_S = 2.0  # time for remaining output to arrive after the process has ended


class Ending(NamedTuple):
    """End of a process: exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    last_output: str  # the end of its stderr


def environment_of_workers(passed_on: Iterable[tuple[str, str]], given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Merge this process's environment, variables from the driver's host and the job's variables."""
    # The stack of a segmentation fault shows its cause.
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    needed = missing_temporary_directory()
    return {**defaults, **inherited_environment(), **dict(passed_on), **dict(given), **needed}


class Child(Protocol):
    """A started process that this process can wait for: ``subprocess.Popen``, or a ForkedChild."""

    pid: int

    def wait(self) -> int: ...


def start_command(
    command: Sequence[str], environment: Mapping[str, str], directory: str, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start a worker as a new process. Raises OSError if that fails."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", exec_shim.__file__, str(os.getpid()), str(descriptors_given()), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
    )


class WorkerProcess:
    """A started worker. ``ended()`` must be awaited once; until then the process id stays reserved."""

    def __init__(self, worker: WorkerId, child: Child, stdout: Pump, stderr: Pump, pipes: tuple[int, int]) -> None:
        """``pipes``: the ends from which this process reads the worker's stdout and stderr."""
        self.worker = worker
        self._process = child
        self._has_ended = False
        self._stderr = stderr
        out, err = (os.fdopen(pipe, "rb", buffering=0) for pipe in pipes)
        self._pumps = [asyncio.ensure_future(stdout.run(out)), asyncio.ensure_future(stderr.run(err))]

    @property
    def pid(self) -> int:
        """Process id; also the id of its session and of its process group."""
        return self._process.pid

    def ask_for_stacks(self) -> None:
        """Let it print the stacks of its threads, even if it was stopped. No effect if it cannot, or has ended."""
        if not self._has_ended and catches(self.pid, STACKS_SIGNAL):
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACKS_SIGNAL)
                os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to its process group. No effect after its end."""
        if not self._has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it. No effect after its end.

        The rest of its session is killed when the process has ended: not its process group at once, because a resource
        tracker of ``multiprocessing`` must outlive the processes whose semaphores it removes.
        """
        if not self._has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def ended(self) -> Ending:
        """Wait for the end of the process, kill the rest of its session, and pass on its remaining output."""
        await ended_child(self.pid)
        self._has_ended = True
        code = await in_thread(self._end_session)
        _, late = await asyncio.wait(self._pumps, timeout=_DRAIN_TIMEOUT_S)  # a detached process may hold a pipe
        for pump in late:
            pump.cancel()
        if code < 0:
            return Ending(None, -code, self._stderr.last_lines)
        return Ending(code, None, self._stderr.last_lines)

    def _end_session(self) -> int:
        """Kill the rest of the session; return the exit code, or -N after signal N.

        Call it in a thread: the kernel may wait for locks of /proc in both.
        """
        kill_session(self.pid, CLEANUP_S)  # before wait(): the zombie reserves the session id
        return self._process.wait()


# ------------------------------------------------------------------------------------------------------------- liveness
# Liveness and progress of one worker, read from its control page. The worker writes its stamps there.


_STAMPS_INTERVAL_S = 1.0
_STAMPS_PER_TIMEOUT = 10
_FEWEST_STAMPS_PER_TIMEOUT = 4
_STAMPS_PER_S = 4000  # limit of stamps that the driver receives


class Liveness:
    """One worker's control page, and when it last changed. Times are passed in, from the agent's monotonic clock.

    A worker is judged from ``begin`` (its Hello) to ``end``. The page may be read, at any time.
    """

    def __init__(self, page: ControlPage, owner: bytes) -> None:
        """Reset the page before the process starts. Only the seals of the previous worker's commits stay."""
        self._page = self._seals = page
        self._page.reset()
        self._owner = owner
        self._judged = False
        self._heartbeat_at = self._moved_at = self._looked_at = 0.0
        self._seen = self._page.stamp()
        self._trains_since = 0
        self._has_changed = False
        self._reported: Stamp | None = None
        self._next_point = 0  # number of the first point on the page that was not reported

    def begin(self, now: float) -> None:
        """Start to judge the worker: its Hello has arrived."""
        self._judged = True
        self._heartbeat_at = self._moved_at = self._looked_at = now

    def storage_is(self, page: ControlPage) -> None:
        """Read seals from the page of the worker's new storage; stamps only if its Hello has not arrived yet."""
        self._seals = page
        if not self._judged:
            self._page = page

    def end(self) -> None:
        """Stop judging the worker."""
        self._judged = False

    def look(self, now: float) -> None:
        """Read the page."""
        last, self._seen, self._looked_at = self._seen, self._page.stamp(), now
        self._trains_since = self._page.trains_since
        if self._seen[0] != last[0]:  # heartbeat
            self._heartbeat_at, self._has_changed = now, True
        if self._seen[1:] != last[1:]:
            self._moved_at = now

    def move(self, now: float) -> None:
        """Count the worker as making progress: it waits for this agent."""
        self._moved_at = now

    def set_lease(self, until_ns: int) -> None:
        """Write the end of the lease to the page (see agent/supervisor.py)."""
        self._page.set_lease(until_ns)

    def forgive(self, seconds: float) -> None:
        """Do not count this time."""
        self._heartbeat_at += seconds
        self._moved_at += seconds

    def verdict(self, now: float, heartbeat_timeout_s: float) -> str:
        """Return why the worker must be given up, or "". A worker that is past the exit gate is not judged."""
        if not self._judged or self._place == Place.DONE or now - self._heartbeat_at <= heartbeat_timeout_s:
            return ""
        return f"no heartbeat for --heartbeat-timeout of {heartbeat_timeout_s:g} s"

    def doubt(self, now: float, hang_timeout_s: float | None) -> str:
        """Return why the worker may hang, or "". It may just as well wait for another worker that hangs."""
        if hang_timeout_s is None or not self._judged or self._place != Place.TRAIN:
            return ""
        return f"no tick for --hang-timeout of {hang_timeout_s:g} s" if now - self._moved_at > hang_timeout_s else ""

    def holds_commit(self, index: int) -> bool:
        """Return True if buffer 0 or 1 carries a seal."""
        return self._seals.sealed(index, self._owner) is not None

    @property
    def generation(self) -> int:
        return self._seen[3]

    @property
    def _place(self) -> Place:
        return _place(self._seen[2])

    @property
    def commits(self) -> tuple[CommitId, ...]:
        """The commits in the buffers, the newest first."""
        return tuple(commit for commit in sealed_commits(self._seals, self._owner) if commit is not None)

    @property
    def latest(self) -> Stamp:
        """The stamp as last read from the page."""
        _, _, place, generation, ticks = self._seen
        newest, previous = sealed_commits(self._seals, self._owner)
        return Stamp(_place(place), generation, ticks, newest, self._page.commit_s, previous=previous)

    def changed_stamp(self) -> Stamp | None:
        """Return the stamp if there was a heartbeat, or any change of the stamp, since the last call; else None."""
        stamp = self.latest
        if not self._has_changed and stamp == self._reported:
            return None
        self._has_changed, self._reported = False, stamp
        still_s = self._looked_at - self._moved_at
        trained_s = self._looked_at - self._trains_since / 1e9 if self._trains_since else 0.0
        points, self._next_point = self._page.points(self._next_point)
        pace = tuple((tick, own_us) for generation, tick, own_us in points if generation == stamp.generation)
        seconds = {"still_s": round(max(0.0, still_s), 3), "trained_s": round(max(0.0, trained_s), 3)}
        return replace(stamp, pace=pace, **seconds)


def stamps_interval_s(heartbeat_timeout_s: float, workers: int) -> float:
    """Return the interval between an agent's Stamps messages, which are the agent's own heartbeats.

    The interval grows with the number of workers, so that the driver keeps up.
    """
    interval_s = min(_STAMPS_INTERVAL_S, heartbeat_timeout_s / _STAMPS_PER_TIMEOUT)
    return min(interval_s * max(1.0, workers / _STAMPS_PER_S), heartbeat_timeout_s / _FEWEST_STAMPS_PER_TIMEOUT)


def sealed_commits(page: ControlPage, owner: bytes) -> tuple[CommitId | None, CommitId | None]:
    """Return the newest commit and the previous commit whose seals are on the page."""
    seals = (page.sealed(index, owner) for index in (0, 1))
    commits = sorted((CommitId(*seal[:2]) for seal in seals if seal is not None), reverse=True)
    return commits[0] if commits else None, commits[1] if len(commits) > 1 else None


def _place(number: int) -> Place:
    """Convert the number on the page. A worker that corrupts its own memory may have written an invalid one."""
    try:
        return Place(number)
    except ValueError:
        return Place.BOOT


@dataclass(slots=True)
class WorkerHandle:
    """A slot with its living worker."""

    process: WorkerProcess
    liveness: Liveness
    audience: Audience
    error_file: str  # name of the file to which the worker writes its last exception
    oom_kills: int  # counter of its memory cgroup when the worker started
    joined: int = 0  # generation of the newest world sent to the worker
    lasting: list[tuple[float, messages.Report]] = field(default_factory=list)
    """Messages since then that a new driver needs, each with its time."""
    notice: messages.WorkerPreemptionNotice | None = None  # preemption notice, if any
    waits: int = 0  # number of requests that wait for this agent
    doubted_at: float | None = None  # since when the worker may hang
    call: CallReport | None = None  # its newest collective call, as last reported
    call_at: float = 0.0  # when that report arrived
    call_is_known: bool = False  # the driver knows that the worker waits in this call
    watcher: asyncio.Task[None] | None = None
    stopping: list[asyncio.TimerHandle] = field(default_factory=list)

    def waited_s(self, now: float) -> float | None:
        """Return the seconds for which the worker has waited in a collective call; None: it does not wait."""
        if self.call is None or self.call.waiting_s is None:
            return None
        return self.call.waiting_s + now - self.call_at

    def call_report(self, now: float) -> CallReport | None:
        """Return the report of its newest collective call, with the present length of the wait."""
        return None if self.call is None else msgspec.structs.replace(self.call, waiting_s=self.waited_s(now))

    def report(self, now: float) -> messages.WorkerReport:
        """Return the report of this worker for a new driver."""
        self.liveness.look(now)
        call = self.call_report(now) if self.call_is_known else None
        lasting = (*(_aged(body, now - at) for at, body in self.lasting), self.notice, call)
        found = tuple(body for body in lasting if body is not None)
        return messages.WorkerReport(self.process.worker, self.process.pid, self.joined, self.liveness.latest, found)


def _aged(body: messages.Report, seconds: float) -> messages.Report:
    """Return a message of a worker for a new driver. READY names the present length of the pause."""
    if not isinstance(body, messages.Ready):
        return body
    return msgspec.structs.replace(body, paused_s=body.paused_s + seconds)


# ---------------------------------------------------------------------------------------------------------- post mortem
# Cause of a worker's end, as far as its host can detect it: from error file, end of stderr, and OOM kill counter.


_CGROUPS = Path("/sys/fs/cgroup")

# Error texts of torch's env:// rendezvous (torch/distributed/rendezvous.py, 2.13), which init_process_group(),
# init_device_mesh() and fully_shard() use, and of os.environ["RANK"]. Only the text can be checked: a script written
# for torchrun need not import elasticstate before it reads these variables.
_NO_WORLD = re.compile(
    r"(environment variable |KeyError: ')(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    r"( expected, but not set|'$)",
    re.MULTILINE,
)

# DistributedDataParallel and most functions of torch.distributed. torch's own advice fits scripts without run only.
_NO_GROUP = "Default process group has not been initialized"


def cause_of_death(
    ending: Ending, written: WorkerError | None, oom_kills: int, oom_kills_before: int
) -> tuple[str, int]:
    """Return the cause as text, and its time in unix nanoseconds.

    The exception that the worker wrote down comes first. Without one, the cause is the end of stderr, which after
    SIGSEGV and similar signals is the stack of the fault (faulthandler).
    """
    if written is not None and ending.exit_code != 0:
        return _with_hint(written.text), written.time_ns
    text = tracebacks.shortened(ending.last_output) if ending.exit_code != 0 else ""
    if ending.signal == signal.SIGKILL and oom_kills > oom_kills_before:
        count = oom_kills - oom_kills_before
        killed = f"{OUT_OF_MEMORY}: its memory cgroup counted {count} OOM kill(s) while the worker ran"
        text = f"{text}\n{killed}" if text else killed
    return _with_hint(text), time.time_ns()


def _with_hint(text: str) -> str:
    """Append advice to the error text if the worker expected a world where none exists."""
    hint = NO_WORLD_HINT if _NO_WORLD.search(text) else NO_GROUP_HINT if _NO_GROUP in text else ""
    return f"{text.rstrip()}\n{hint}" if hint else text


def count_oom_kills(groups: Path = Path("/proc/self/cgroup"), mounted: Path = _CGROUPS) -> int:
    """Count OOM kills in the memory cgroup of this process, with all cgroups below it; 0 if there is no counter.

    See cgroups(7); memory.events of version 2, memory.oom_control of version 1.
    """
    try:
        counter = _oom_counter(groups, mounted)
        return _read_oom_kills(counter) if counter is not None else 0
    except (OSError, ValueError):
        return 0


@cache
def _oom_counter(groups: Path, mounted: Path) -> Path | None:
    """Return the file with the counter. A read of ``groups`` waits for every change of a cgroup, so it is read once."""
    lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return mounted / "memory" / path.lstrip("/") / "memory.oom_control"
    for _, controllers, path in lines:
        if not controllers:
            return mounted / path.lstrip("/") / "memory.events"
    return None


def _read_oom_kills(events: Path) -> int:
    counts = dict(line.split(" ", 1) for line in events.read_text().splitlines())
    return int(counts.get("oom_kill", 0))
