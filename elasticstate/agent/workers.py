"""Workers: the living workers of a host, from their start to the report of their end, and its cause.

Their processes fork from the template process if they can. Workers that do not use ``run`` have stores here, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from elasticstate import commits, tracebacks
from elasticstate.agent import exec_shim
from elasticstate.agent.affinity import Binding, bound
from elasticstate.agent.host_job import HostJob
from elasticstate.agent.host_storage import HostStorage, StorageAllocator
from elasticstate.agent.supervisor import Liveness, Supervisor
from elasticstate.agent.template_process import Child, Template, TemplateError, for_new_process, start_command
from elasticstate.agent.worker_output import Audience, Pump
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import CallReport, PlainPlace, PlainStoreJoined
from elasticstate.errors import CommitStorageError
from elasticstate.failures import NO_GROUP_HINT, NO_STDIN_HINT, NO_WORLD_HINT, OUT_OF_MEMORY
from elasticstate.net import messages
from elasticstate.net.link import AgentSocket, ForkRequest, StandardDescriptors, StoreListener
from elasticstate.net.messages import STACKS_SIGNAL, STORE_JOINED, NextStore
from elasticstate.net.names import is_loopback, selecting_interface
from elasticstate.options import WorkerEnvironment, plain_variables
from elasticstate.processes import CLEANUP_S, catches, ended_child, kill_session, reading, remedy_for
from elasticstate.threads import in_thread
from elasticstate.tracebacks import WorkerError

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Variable that lets torch record the last collectives of a process. Each costs about a microsecond."""
_DRAIN_TIMEOUT_S = 2.0  # time for remaining output to arrive after the process has ended


class Ending(NamedTuple):
    """End of a process: exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    last_output: str  # the end of its stderr


class WorkerProcess:
    """A started worker. ``ended()`` must be awaited once; until then the process id stays reserved."""

    def __init__(self, worker: WorkerId, child: Child, stdout: Pump, stderr: Pump, pipes: tuple[int, int]) -> None:
        """``pipes``: the ends from which this process reads the worker's stdout and stderr."""
        self.worker = worker
        self._process = child
        self.ended_ns = 0  # unix time at which its end was noticed; 0: it lives
        self._stderr = stderr
        out, err = (os.fdopen(pipe, "rb", buffering=0) for pipe in pipes)
        self._pumps = [asyncio.ensure_future(stdout.run(out)), asyncio.ensure_future(stderr.run(err))]

    @property
    def pid(self) -> int:
        """Process id; also the id of its session and of its process group."""
        return self._process.pid

    def ask_for_stacks(self) -> None:
        """Let it print the stacks of its threads, even if it was stopped. No effect if it cannot, or has ended."""
        if not self.ended_ns and catches(self.pid, STACKS_SIGNAL):
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACKS_SIGNAL)
                os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to its process group. No effect after its end."""
        if not self.ended_ns:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it. No effect after its end.

        The rest of its session is killed when the process has ended: not its process group at once, because a resource
        tracker of ``multiprocessing`` must outlive the processes whose semaphores it removes.
        """
        if not self.ended_ns:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def ended(self) -> Ending:
        """Wait for the end of the process, kill the rest of its session, and pass on its remaining output."""
        await ended_child(self.pid)
        self.ended_ns = time.time_ns()
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


@dataclass(slots=True)
class WorkerHandle:
    """A slot with its living worker."""

    process: WorkerProcess
    liveness: Liveness
    audience: Audience
    error_file: str  # name of the file to which the worker writes its last exception
    oom_kills: int  # counter of its memory cgroup when the worker started
    has_stdin: bool  # of elasticrun
    joined: int = 0  # generation of the newest world sent to the worker
    lasting: list[tuple[float, messages.Report]] = field(default_factory=list)
    """Messages since then that a new driver needs, each with its time."""
    notice: messages.WorkerPreemptionNotice | None = None  # preemption notice, if any
    waits: int = 0  # number of requests that wait for this agent
    doubted_at: float | None = None  # since when the worker may hang
    call: CallReport | None = None  # its newest collective call, as last reported
    call_at: float = 0.0  # when that report arrived
    call_is_known: bool = False  # the driver knows that the worker waits in this call
    metrics: dict[str, float] = field(default_factory=dict)  # values that the driver has not got yet
    digests: list[messages.CommitDigests] = field(default_factory=list)  # that the driver has not got yet
    awaited: list[messages.CommitDigests] = field(default_factory=list)
    """Digests of the commits in its buffers, and newer ones, that a new driver needs."""
    watcher: asyncio.Task[None] | None = None
    stopping: list[asyncio.TimerHandle] = field(default_factory=list)

    def ended_before(self, other: WorkerProcess) -> bool:
        return 0 < self.process.ended_ns < other.ended_ns

    def waited_s(self, now: float) -> float | None:
        """Return the seconds for which the worker has waited in a collective call; None: it does not wait."""
        if self.call is None or self.call.waiting_s is None:
            return None
        return self.call.waiting_s + now - self.call_at

    def call_report(self, now: float) -> CallReport | None:
        """Return the report of its newest collective call, with the present length of the wait."""
        return None if self.call is None else replace(self.call, waiting_s=self.waited_s(now))

    def keep(self, message: messages.CommitDigests) -> None:
        """Keep a digest whose verdict the worker awaits for a new driver, and forget those of overwritten commits."""
        held = set(self.liveness.commits)
        self.awaited = [m for m in self.awaited if held.intersection(CommitId(m.generation, d[1]) for d in m.digests)]
        self.awaited.append(message)

    def report(self, now: float) -> messages.WorkerReport:
        """Return the report of this worker for a new driver."""
        self.liveness.look(now)
        call = self.call_report(now) if self.call_is_known else None
        lasting = (*self.awaited, *(_aged(body, now - at) for at, body in self.lasting), self.notice, call)
        found = tuple(body for body in lasting if body is not None)
        return messages.WorkerReport(self.process.worker, self.process.pid, self.joined, self.liveness.latest, found)


def _aged(body: messages.Report, seconds: float) -> messages.Report:
    """Return a message of a worker for a new driver. READY names the present length of the pause."""
    if not isinstance(body, messages.Ready):
        return body
    return replace(body, paused_s=body.paused_s + seconds)


class Workers:
    """Starts, stops and watches workers, and reports their ends to the driver."""

    def __init__(
        self,
        job: HostJob,
        storage: HostStorage,
        allocator: StorageAllocator,
        socket: AgentSocket,
        supervisor: Supervisor,
        template: Template | None,
    ) -> None:
        """``template``: from which workers fork, if they can; None if it is of no use."""
        self._job = job
        self._storage = storage
        self._allocator = allocator
        self._socket = socket
        self._supervisor = supervisor
        self._template = template
        self._binding = Binding(job.options.bind, job.environment(), job.warn)
        self._starting: dict[WorkerId, asyncio.Task[None]] = {}
        self._unwanted: set[WorkerId] = set()  # workers that are to stop as soon as they have started
        # For the report to a new driver:
        self.exits: list[messages.WorkerExited] = []  # since this host received its last world
        self.incarnations: dict[int, int] = {}  # newest one of each slot
        self._placed = 0  # newest world of plain workers

    def start(self, order: messages.StartWorker) -> None:
        """Start a worker. If that fails, the driver receives the end of the worker."""
        worker, place = order.worker, order.place
        if place is not None and place.generation > self._placed:
            self._placed = place.generation
            self.exits.clear()
        self.incarnations[worker.slot] = worker.incarnation
        starting = self._starting[worker] = asyncio.ensure_future(self._start(order))
        starting.add_done_callback(lambda _: self._starting.pop(worker))

    async def _start(self, order: messages.StartWorker) -> None:
        worker, place = order.worker, order.place
        try:
            if order.fit_bytes:
                await self._allocator.check_fits(worker.slot, order.fit_bytes)
            handle = await self._start_worker(order)
        except (OSError, ValueError, CommitStorageError) as error:
            self._job.log(f"could not start {worker}: {error}")
            self._report_exit(messages.WorkerExited(worker, 0, 127, None, f"could not be started: {error}"))
            return
        handle.liveness.set_lease(self._supervisor.lease.until_ns)
        if place is not None:
            handle.joined, handle.audience.rank = place.generation, place.rank
        self._job.handles[worker] = handle
        self._job.driver.send(messages.Started(worker, handle.process.pid))
        handle.watcher = asyncio.ensure_future(self._watch(handle))
        if worker in self._unwanted:
            self._unwanted.remove(worker)
            self.stop(worker, kill=True)  # its script has hardly begun
        if order.reserve_bytes:  # while it boots
            self._job.begin(self._allocator.reserve(worker.slot, order.reserve_bytes, handle.liveness.holds_commit))

    async def all_started(self) -> None:
        """Wait until no worker is being started, so that a report has all of them."""
        while self._starting:
            await asyncio.wait(self._starting.values())

    async def _watch(self, handle: WorkerHandle) -> None:
        """Wait for the end of a worker, and report it after all that the worker has sent."""
        process = handle.process
        ending = await process.ended()
        while before := [h.watcher for h in self._job.handles.values() if h.watcher and h.ended_before(process)]:
            await asyncio.wait(before)  # reported in order: the first death is the cause of those that follow
        self._socket.drain(process.worker)
        handle.liveness.look(asyncio.get_running_loop().time())
        self._supervisor.send_stamps()  # its last commits
        for trouble in self._job.outputs.changes():  # output that was dropped
            self._job.driver.send(trouble)
        for timer in handle.stopping:
            timer.cancel()
        del self._job.handles[process.worker]
        self._job.outputs.ended(process.worker)
        self._socket.disconnect(process.worker)
        written = tracebacks.read(handle.error_file, self._storage.directory.fd)
        error, time_ns = cause_of_death(ending, written, count_oom_kills(), handle.oom_kills)
        if not handle.has_stdin and _WANTS_STDIN.search(error):
            error = f"{error.rstrip()}\n{NO_STDIN_HINT}"
        if ending.exit_code in (126, 127) and _CANNOT_RUN in error:
            remedy = remedy_for(self._job.options.command[0], self._job.launch.directory)
            error = f"{error.rstrip()}\n{remedy}" if remedy else error
        end = (ending.exit_code, ending.signal, error, time_ns or process.ended_ns, handle.liveness.commits)
        self._report_exit(messages.WorkerExited(process.worker, process.pid, *end))

    def _report_exit(self, exited: messages.WorkerExited) -> None:
        self.exits.append(exited)
        self._job.driver.send(exited)

    def stop(self, worker: WorkerId, kill: bool = False) -> None:
        """Stop a worker; after ``--stop-timeout`` kill it. ``kill``: kill it at once.

        A connected worker receives Leave. Any other worker receives SIGTERM.
        """
        handle = self._job.handles.get(worker)
        if handle is None:
            self._unwanted.update({worker}.intersection(self._starting))
            return
        if kill:
            handle.process.kill()
        elif self._socket.is_connected(worker):
            self._socket.send(worker, messages.encode_to_worker(messages.Leave(worker)))
        else:
            handle.process.terminate()
        self.kill_later(worker)

    def kill_later(self, worker: WorkerId) -> None:
        """Kill a worker that is to leave, if it still lives after ``--stop-timeout``."""
        handle = self._job.handles.get(worker)
        if handle is not None:
            loop = asyncio.get_running_loop()
            handle.stopping.append(loop.call_later(self._job.options.stop_timeout_s, handle.process.kill))

    async def stop_all(self, kill: bool = False) -> None:
        """Stop all workers, and wait for their ends. ``kill``: kill them at once."""
        for worker in [*self._job.handles, *self._starting]:
            self.stop(worker, kill)
        await self.all_started()
        while watchers := [handle.watcher for handle in self._job.handles.values() if handle.watcher is not None]:
            await asyncio.wait(watchers)

    # ------------------------------------------------------------------------------------------ start of processes

    async def _start_worker(self, order: messages.StartWorker) -> WorkerHandle:
        """Start a worker. Raises OSError, ValueError or CommitStorageError if that fails."""
        options, storage, worker = self._job.options, self._storage, order.worker
        stdin = self._job.launch.stdin if order.has_stdin else None
        try:
            liveness = Liveness(storage.files(worker.slot).page, storage.owner(worker.slot))
            storage.make_result(worker.slot)
            error_name = commits.error_file(worker.slot)
            tracebacks.forget(error_name, storage.directory.fd)
            audience = Audience(options.only_ranks)
            is_interactive = stdin is not None and options.is_interactive
            pumps = self._job.outputs.pumps(worker, options, audience, is_interactive)
            oom_kills = await in_thread(count_oom_kills)  # the first call may wait for a change of a cgroup
            child, pipes = await self._start_process(
                self._environment(worker, order.reserve_bytes, order.place),
                os.devnull if stdin is None else stdin,
                self._binding.cores(worker.slot, order.slots),
            )
            process = WorkerProcess(worker, child, *pumps, pipes)
            if is_interactive:
                self._job.outputs.reads_keys(worker, process.pid)
        except (OSError, ValueError, CommitStorageError):
            self._job.outputs.ended(worker)
            raise
        return WorkerHandle(process, liveness, audience, error_name, oom_kills, stdin is not None)

    async def _start_process(
        self, environment: dict[str, str], source: str | int, cores: frozenset[int]
    ) -> tuple[Child, tuple[int, int]]:
        """Start the process, with ``source`` as stdin. Return it, and the ends from which to read stdout and stderr."""
        stdin = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDONLY)
        (out, stdout), (err, stderr) = os.pipe(), os.pipe()
        try:
            return await self._child(environment, (stdin, stdout, stderr), cores), (out, err)
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)

    async def _child(
        self, environment: dict[str, str], descriptors: StandardDescriptors, cores: frozenset[int]
    ) -> Child:
        command, directory = self._job.options.command, self._job.launch.directory
        if self._template is not None:
            try:
                request = ForkRequest(tuple(command), directory, environment)
                return await self._template.fork(request, descriptors, cores)
            except TemplateError as error:
                self._job.warn(
                    f"a worker starts as a new process, which imports torch anew: the template process {error}"
                )
        own_command = await in_thread(for_new_process, command, directory, environment)
        with bound(cores):
            return start_command(own_command, environment, directory, *descriptors)

    def _environment(self, worker: WorkerId, reserve_bytes: int, place: PlainPlace | None) -> dict[str, str]:
        job = self._job
        own = WorkerEnvironment(
            socket=job.place.socket,
            agent=job.place.mark,
            worker=worker,
            job=job.spec.job,
            job_id=job.spec.job_id,
            local_address=job.local_address,
            commits=str(self._storage.directory.path / str(worker.slot)),
            reserve_bytes=reserve_bytes,
            preemption_signals=job.options.preemption_signals,
            backend=job.options.backend,
            one_copy=job.options.one_copy_per_host,
            start_size=job.options.np,
        )
        common = job.environment()
        plain: dict[str, str] = {}
        if place is not None:
            # By this interface other hosts reach this one; None if none do, or if it is not known.
            interface = None if is_loopback(job.local_address) else selecting_interface(job.local_address)
            plain = plain_variables(place, job.spec.job, common, interface)
        return {**FLIGHT_RECORDER, **common, **plain, **own.variables()}


# Error texts of torch's env:// rendezvous (torch/distributed/rendezvous.py, 2.13), which init_process_group(),
# init_device_mesh() and fully_shard() use, and of os.environ["RANK"]. Only the text can be checked: a script written
# for torchrun need not import elasticstate before it reads these variables.
_NO_WORLD = re.compile(
    r"(environment variable |KeyError: ')(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    r"( expected, but not set|'$)",
    re.MULTILINE,
)

# breakpoint() and input() without a terminal. pdb ends as after its command q.
_CANNOT_RUN = "elasticstate: cannot run "  # of exec_shim.py
_WANTS_STDIN = re.compile(r"^(bdb\.BdbQuit|EOFError: EOF when reading a line)$", re.MULTILINE)

# DistributedDataParallel and most functions of torch.distributed. torch's own advice fits scripts without run only.
_NO_GROUP = "Default process group has not been initialized"


def cause_of_death(
    ending: Ending, written: WorkerError | None, oom_kills: int, oom_kills_before: int
) -> tuple[str, int]:
    """Return the cause as text, and the time of the exception in unix nanoseconds; 0: there is none.

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
    return _with_hint(text), 0


def _with_hint(text: str) -> str:
    """Append advice to the error text if the worker expected a world where none exists."""
    hint = NO_WORLD_HINT if _NO_WORLD.search(text) else NO_GROUP_HINT if _NO_GROUP in text else ""
    return f"{text.rstrip()}\n{hint}" if hint else text


def count_oom_kills(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Count OOM kills in the memory cgroup of this process, with all cgroups below it; 0 if there is no counter.

    See cgroups(7); memory.events of version 2, memory.oom_control of version 1.
    """
    try:
        counter = _oom_counter(groups, mounted)
        lines = [] if counter is None else counter.read_text().splitlines()
        return int(dict(line.split(" ", 1) for line in lines).get("oom_kill", 0))
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


# -------------------------------------------------------------------------------------------------------- plain stores
# Stores for worlds of plain workers: each world has one of its own, as torchrun's agent provides it. The agent
# listens on the port of the next store, and starts the process that serves it at the first connection. So
# an elastic job starts no such process, and a worker that connects early waits in the backlog.


_PROGRAM = str(Path(exec_shim.__file__).parents[1] / "worker" / "plain_store.py")


class PlainStores:
    """The stores of one agent: the one in use, and the next one."""

    def __init__(self, job: HostJob, template: Template | None) -> None:
        self._job = job
        self._template = template
        self._next = self._listen()
        self._used: asyncio.Task[None] | None = None
        self.joined = 0  # the newest plain world of which a worker has joined a store here

    def _listen(self) -> StoreListener | None:
        try:
            return StoreListener(self._job.local_address)
        except OSError as error:
            self._job.log(f"cannot listen at {self._job.local_address} for plain workers: {error.strerror or error}")
            return None

    @property
    def next_address(self) -> str:
        """Address of the store for the next world; "": there is none."""
        return "" if self._next is None else self._next.address

    def use(self, place: PlainPlace) -> None:
        """Serve the world of a worker that starts here, if its store is the next one of this host."""
        if self._next is None or place.store != self._next.address:
            return
        self._end_used()
        self._used = asyncio.ensure_future(self._serve(self._next, place.generation))
        self._next = self._listen()
        self._job.driver.send(NextStore(self.next_address))

    async def _serve(self, listener: StoreListener, generation: int) -> None:
        """Serve a store until this task is cancelled."""
        readable, writable = os.pipe()
        pidfd = -1
        try:
            try:
                await listener.first_connection()
                child = await self._start(listener, writable)
                pidfd = os.pidfd_open(child.pid)
            except (OSError, ValueError) as error:
                self._job.log(f"the store of plain workers could not be started: {error}")
                return
            finally:
                listener.close()
                os.close(writable)
            await self._read(readable, generation)
            with suppress(ChildProcessError):  # the agent's watch of orphans was faster
                child.wait()
        finally:
            if pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)

    async def _start(self, listener: StoreListener, stderr: int) -> Child:
        """Start the process that serves a store (worker/plain_store.py). Raises OSError."""
        environment = self._job.environment()
        command = (sys.executable, _PROGRAM, self._job.local_address, str(listener.port))
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            descriptors = (nothing, listener.fileno(), stderr)
            if self._template is not None:
                with suppress(TemplateError):  # the workers' own starts have reported this
                    return await self._template.fork(ForkRequest(command, "/", environment), descriptors)
            return start_command(command, environment, "/", *descriptors)
        finally:
            os.close(nothing)

    async def _read(self, pipe: int, generation: int) -> None:
        """Read what the process writes, until its end."""
        async with reading(os.fdopen(pipe, "rb")) as reader:
            while line := (await reader.readline()).decode(errors="replace").rstrip():
                if line == STORE_JOINED:
                    self.joined = generation
                    self._job.driver.send(PlainStoreJoined(generation))
                else:
                    self._job.log(f"store of plain workers: {line}")

    def _end_used(self) -> None:
        if self._used is not None:
            self._used.cancel()
            self._used = None

    def close(self) -> None:
        """End all stores: the workers have an elastic world, or the job is over."""
        self._end_used()
        self.close_next()

    def close_next(self) -> None:
        """Provide no further store: the command is elastic. The store in use shows whether all workers are."""
        if self._next is not None:
            self._next.close()
            self._next = None
            self._job.driver.send(NextStore(""))
