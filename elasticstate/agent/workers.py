"""Workers: the living workers of a host, from their start to the report of their end."""

from __future__ import annotations

import ast
import asyncio
import hmac
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path

from elasticstate import commits, tracebacks
from elasticstate.agent import exec_shim
from elasticstate.agent.connection import DriverConnection
from elasticstate.agent.files import JobPlace
from elasticstate.agent.output import Audience, Outputs
from elasticstate.agent.plain_stores import PlainStores
from elasticstate.agent.storage import HostStorage, StorageAllocator
from elasticstate.agent.supervisor import Supervisor
from elasticstate.agent.template import Template, TemplateError
from elasticstate.agent.worker import (
    Child,
    Liveness,
    WorkerHandle,
    WorkerProcess,
    cause_of_death,
    count_oom_kills,
    environment_of_workers,
    sealed_commits,
    start_command,
)
from elasticstate.commits import RESULT_HEAD_BYTES, result_hasher
from elasticstate.copies.pusher import HostCopies
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import PlainPlace
from elasticstate.errors import CommitStorageError
from elasticstate.net import codec, messages
from elasticstate.net.link import AgentSocket, ForkRequest, StoreListener
from elasticstate.net.messages import JobSpec, Launch
from elasticstate.net.names import is_loopback, selecting_interface
from elasticstate.options import WorkerEnvironment, agent_variable, plain_variables

# ------------------------------------------------------------------------------------------------------- python command
# The workers' command, as far as worker/script.py needs to understand it, which runs it: in the template process's
# children, and in new processes.


UNBUFFERED = "-u"
_IN_NEW_PROCESS = str(Path(__file__).parents[1] / "worker" / "new_process.py")

# Variables that torch and the libraries below it read when they are imported.
_READ_AT_IMPORT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|GOTO|NUMEXPR|VECLIB|ATEN|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|TRITON|LD|PYTHON)_[A-Z0-9_]+"
    r"|TORCHDYNAMO_[A-Z_]+|PYTHON[A-Z]+"
)
_READ_LATER = re.compile(r"TORCH_(NCCL|GLOO|FR)_[A-Z0-9_]+|TORCHELASTIC_[A-Z0-9_]+|PYTORCH_NVML_BASED_CUDA_CHECK")


def is_python(command: Sequence[str]) -> bool:
    """Return True if the command names a Python interpreter, or is a Python script."""
    return bool(re.fullmatch(r"python[0-9.]*", os.path.basename(command[0])))


def reason_against_template(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> str:
    """Return why workers with this command cannot fork from the template process, or ""."""
    if reason := _reason_in_command(command, directory, environment):
        return reason
    words = _words(command)
    return "" if words[0] == "-m" else _reason_in_script(Path(directory, words[0]))


def for_new_process(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> Sequence[str]:
    """Return the command that does the same in a new process, and ends as a forked worker does, if that is possible."""
    if not is_python(command) or _reason_in_command(command, directory, environment):
        return command
    words = _words(command)
    return [*command[: len(command) - len(words)], _IN_NEW_PROCESS, *words]


def _words(command: Sequence[str]) -> list[str]:
    """Return what follows the interpreter and its option."""
    return list(dropwhile(UNBUFFERED.__eq__, command[1:]))


def _reason_in_command(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> str:
    """Return why worker/script.py cannot run this command, or ""."""
    # A path counts from the directory of the job, in which the worker starts, not from that of the agent.
    is_path = os.path.dirname(command[0]) != ""
    program = command[0] if is_path else shutil.which(command[0], path=environment.get("PATH"))
    if program is None or not _is_this_python(os.path.join(directory, program)):
        return f"{command[0]} is another Python than {sys.executable}, which runs the agent"
    words = _words(command) if environment.get("PYTHONUNBUFFERED") else list(command[1:])
    if words[:1] == ["-m"] and len(words) > 1:
        return ""
    if not words or words[0].startswith("-"):
        return f"the interpreter has the argument {words[0]!r}" if words else "the interpreter has no script"
    try:
        is_source = b"\0" not in Path(directory, words[0]).read_bytes()
    except OSError:
        return f"{words[0]} is not a file"
    return "" if is_source else f"{words[0]} is no source file"


def _is_this_python(program: str) -> bool:
    """Return True for this process's interpreter: the same program in the same virtual environment."""
    same_directory = os.path.realpath(os.path.dirname(program)) == os.path.realpath(os.path.dirname(sys.executable))
    return same_directory and os.path.realpath(program) == os.path.realpath(sys.executable)


def _reason_in_script(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""  # the worker shows the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if _READ_AT_IMPORT.fullmatch(name) and not _READ_LATER.fullmatch(name):
                return f"{path.name} mentions {name}, which takes effect only if it is set before imports"
    return ""


def script_directory(command: Sequence[str], directory: str) -> str:
    """Return the directory that the interpreter puts first in ``sys.path`` for the command."""
    words = _words(command)
    return directory if words[0] == "-m" else os.path.dirname(os.path.realpath(os.path.join(directory, words[0])))


# ------------------------------------------------------------------------------------------------------- worker starter
# WorkerStarter: starts the processes of workers. They fork from the template process if they can.


STORE_PROGRAM = str(Path(exec_shim.__file__).parents[1] / "worker" / "plain_store.py")


FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Variable that lets torch record the last collectives of a process. Each costs about a microsecond."""


class WorkerStarter:
    """Starter of workers, each with its files, output and environment."""

    def __init__(
        self,
        launch: Launch,
        spec: JobSpec,
        place: JobPlace,
        storage: HostStorage,
        outputs: Outputs,
        local_address: str,
        template: Template | None,
        warn: Callable[[str], None],
    ) -> None:
        """``local_address``: the address at which other hosts reach this one. ``template``: None if it is of no use."""
        self._launch = launch
        self._spec = spec
        self._place = place
        self._storage = storage
        self._outputs = outputs
        self._local_address = local_address
        self._template = template
        self._warn = warn

    async def start(self, worker: WorkerId, reserve_bytes: int, place: PlainPlace | None) -> WorkerHandle:
        """Start a worker. Raises OSError, ValueError or CommitStorageError if that fails."""
        options, storage = self._spec.options, self._storage
        try:
            liveness = Liveness(storage.files(worker.slot).page, storage.owner(worker.slot))
            storage.make_result(worker.slot)
            error_name = commits.error_file(worker.slot)
            tracebacks.forget(error_name, storage.directory.fd)
            audience = Audience(options.only_ranks)
            pumps = self._outputs.pumps(worker, options, audience)
            child, pipes = await self._start_process(self._environment(worker, reserve_bytes, place))
            process = WorkerProcess(worker, child, *pumps, pipes)
        except (OSError, ValueError, CommitStorageError):
            self._outputs.ended(worker)
            raise
        return WorkerHandle(process, liveness, audience, error_name, count_oom_kills())

    async def _start_process(self, environment: dict[str, str]) -> tuple[Child, tuple[int, int]]:
        """Start the process. Return it, with the ends from which to read its stdout and stderr."""
        (out, stdout), (err, stderr) = os.pipe(), os.pipe()
        try:
            return await self._child(environment, stdout, stderr), (out, err)
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(stdout)
            os.close(stderr)

    async def _child(self, environment: dict[str, str], stdout: int, stderr: int) -> Child:
        command, directory = self._spec.options.command, self._launch.directory
        if self._template is not None:
            try:
                request = ForkRequest(tuple(command), directory, environment)
                return await self._template.fork(request, stdout, stderr)
            except TemplateError as error:
                self._warn(f"a worker starts as a new process, which imports torch anew: the template process {error}")
        return start_command(for_new_process(command, directory, environment), environment, directory, stdout, stderr)

    def _environment(self, worker: WorkerId, reserve_bytes: int, place: PlainPlace | None) -> dict[str, str]:
        spec = self._spec
        own = WorkerEnvironment(
            socket=self._place.socket,
            agent=self._place.mark,
            worker=worker,
            job=spec.job,
            job_id=spec.job_id,
            local_address=self._local_address,
            commits=str(self._storage.directory.path / str(worker.slot)),
            reserve_bytes=reserve_bytes,
            preemption_signals=spec.options.preemption_signals,
            backend=spec.options.backend,
            one_copy=spec.options.one_copy_per_host,
            start_size=spec.options.np,
        )
        common = environment_of_workers(self._launch.environment, spec.environment)
        plain = {} if place is None else plain_variables(place, spec.job, common, self._interface())
        return {**FLIGHT_RECORDER, **common, **plain, **own.variables()}

    def _interface(self) -> str | None:
        """Return the network interface by which other hosts reach this one; None if none do, or if it is not known."""
        return None if is_loopback(self._local_address) else selecting_interface(self._local_address)

    async def start_store(self, listener: StoreListener, stderr: int) -> Child:
        """Start the process that serves a store for plain workers (worker/plain_store.py). Raises OSError."""
        environment = environment_of_workers(self._launch.environment, self._spec.environment)
        environment.update([agent_variable(self._place.mark)])
        command = (sys.executable, STORE_PROGRAM, self._local_address, str(listener.port))
        if self._template is not None:
            try:
                request = ForkRequest(command, "/", environment)
                return await self._template.fork(request, listener.fileno(), stderr)
            except TemplateError:
                pass  # the workers' own starts have reported this
        return start_command(command, environment, "/", listener.fileno(), stderr)


# ---------------------------------------------------------------------------------------------------------- host report
# Report of what has happened on a host, for a driver that was disconnected or has just started.


class HostReporter:
    """Records the events that a host report needs, while the agent runs."""

    def __init__(self, storage: HostStorage, stores: PlainStores, copies: HostCopies) -> None:
        self._storage = storage
        self._stores = stores
        self._copies = copies
        self._exits: list[messages.WorkerExited] = []  # since this host received its last world
        self._incarnations: dict[int, int] = {}
        self._placed = 0  # newest world of plain workers
        self._attached: tuple[tuple[WorkerId, messages.Attached], ...] = ()  # the newest report
        self._gate = 0  # newest generation whose exit gate is open
        self._ended = 0  # newest generation that was ended at once, not at a tick
        self.held: int | None = None  # generation on hold, if any

    def started(self, worker: WorkerId, place: PlainPlace | None) -> None:
        if place is not None and place.generation > self._placed:
            self._placed = place.generation
            self.has_a_world()
        self._incarnations[worker.slot] = worker.incarnation

    def attached(self, worker: WorkerId, message: messages.Attached) -> None:
        self._attached = ((worker, message),)

    def ended(self, exited: messages.WorkerExited) -> None:
        self._exits.append(exited)

    def has_a_world(self) -> None:
        """Forget earlier exits: this host has received a new world."""
        self._exits.clear()

    def sent(self, body: messages.ToWorkerBody) -> None:
        """Record a message of the driver to the workers: holds, ends and the exit gate."""
        match body:
            case messages.Hold(generation):
                self.held = generation
            case messages.Release():
                self.held = None
            case messages.End(generation, at_tick):
                self.held = None
                if at_tick is None:
                    self._ended = max(self._ended, generation)
            case messages.OpenGate(generation):
                self._gate = generation

    def host_report(self, handles: Mapping[WorkerId, WorkerHandle], now: float) -> messages.HostReport:
        """Return the report for a driver, including the workers that live here."""
        found = list(self._in_memory())
        return messages.HostReport(
            commits=tuple((slot, newest) for slot, newest, _ in found),
            workers=tuple(_report(worker, handle, now) for worker, handle in handles.items()),
            exits=tuple(self._exits),
            incarnations=tuple(self._incarnations.items()),
            gate=self._gate,
            ended=self._ended,
            store=self._stores.next_address,
            store_joined=self._stores.joined,
            previous=tuple((slot, previous) for slot, _, previous in found if previous is not None),
            attached=self._attached,
            kept=tuple(self._copies.kept()),
            copies_address=self._copies.address,
        )

    def _in_memory(self) -> Iterator[tuple[int, CommitId, CommitId | None]]:
        """Yield slot and commits, whichever worker wrote them: a booting worker may not have found them yet."""
        for slot, files in sorted(self._storage.slots().items()):
            newest, previous = sealed_commits(files.page, self._storage.owner(slot))
            if newest is not None:
                yield slot, newest, previous


def _report(worker: WorkerId, handle: WorkerHandle, now: float) -> messages.WorkerReport:
    handle.liveness.look(now)
    report = handle.call_report(now) if handle.call_is_known else None
    lasting = tuple(body for body in (*handle.lasting_messages(now), handle.notice, report) if body is not None)
    return messages.WorkerReport(worker, handle.process.pid, handle.joined, handle.liveness.latest, lasting)


# -------------------------------------------------------------------------------------------------------------- workers


class Workers:
    """Starts, stops and watches workers, and reports their ends to the driver."""

    def __init__(
        self,
        handles: dict[WorkerId, WorkerHandle],
        starter: WorkerStarter,
        driver: DriverConnection,
        socket: AgentSocket,
        supervisor: Supervisor,
        reporter: HostReporter,
        outputs: Outputs,
        storage: HostStorage,
        allocator: StorageAllocator,
        stop_timeout_s: float,
    ) -> None:
        """``handles``: shared with other parts of the agent; only this class changes it."""
        self.handles = handles
        self._starter = starter
        self._driver = driver
        self._socket = socket
        self._supervisor = supervisor
        self._reporter = reporter
        self._outputs = outputs
        self._storage = storage
        self._allocator = allocator
        self._stop_timeout_s = stop_timeout_s
        self._starting: dict[WorkerId, asyncio.Task[WorkerHandle | None]] = {}
        self._unwanted: set[WorkerId] = set()  # workers that are to stop as soon as they have started

    def start(self, order: messages.StartWorker) -> asyncio.Task[WorkerHandle | None]:
        """Start a worker. The result is None if that fails; the driver then receives the end of the worker."""
        worker = order.worker
        self._reporter.started(worker, order.place)
        starting = self._starting[worker] = asyncio.ensure_future(self._start(order))
        starting.add_done_callback(lambda _: self._starting.pop(worker))
        return starting

    async def _start(self, order: messages.StartWorker) -> WorkerHandle | None:
        worker, place = order.worker, order.place
        try:
            if order.fit_bytes:
                await self._allocator.check_fits(worker.slot, order.fit_bytes)
            handle = await self._starter.start(worker, order.reserve_bytes, place)
        except (OSError, ValueError, CommitStorageError) as error:
            self._outputs.complain(f"could not start {worker}: {error}")
            self._report_exit(messages.WorkerExited(worker, 0, 127, None, f"could not be started: {error}"))
            return None
        handle.liveness.set_lease(self._supervisor.lease.until_ns)
        if place is not None:
            handle.joined, handle.audience.rank = place.generation, place.rank
        self.handles[worker] = handle
        self._driver.send(messages.Started(worker, handle.process.pid))
        handle.watcher = asyncio.ensure_future(self._watch(handle))
        if worker in self._unwanted:
            self._unwanted.remove(worker)
            self.stop(worker, kill=True)  # its script has hardly begun
        return handle

    async def all_started(self) -> None:
        """Wait until no worker is being started, so that a report has all of them."""
        while self._starting:
            await asyncio.wait(self._starting.values())

    async def _watch(self, handle: WorkerHandle) -> None:
        """Wait for the end of a worker, and report it after all that the worker has sent."""
        process = handle.process
        ending = await process.ended()
        self._socket.drain(process.worker)
        handle.liveness.look(asyncio.get_running_loop().time())
        self._supervisor.send_stamps()  # its last commits
        for trouble in self._outputs.changes():  # output that was dropped
            self._driver.send(trouble)
        for timer in handle.stopping:
            timer.cancel()
        del self.handles[process.worker]
        self._outputs.ended(process.worker)
        self._socket.disconnect(process.worker)
        written = tracebacks.read(handle.error_file, self._storage.directory.fd)
        error, time_ns = cause_of_death(ending, written, count_oom_kills(), handle.oom_kills)
        end = (ending.exit_code, ending.signal, error, time_ns, handle.liveness.commits)
        self._report_exit(messages.WorkerExited(process.worker, process.pid, *end))

    def _report_exit(self, exited: messages.WorkerExited) -> None:
        self._reporter.ended(exited)
        self._driver.send(exited)

    def stop(self, worker: WorkerId, kill: bool = False) -> None:
        """Stop a worker; after ``--stop-timeout`` kill it. ``kill``: kill it at once.

        A connected worker receives Leave. Any other worker receives SIGTERM.
        """
        handle = self.handles.get(worker)
        if handle is None:
            self._unwanted.update({worker}.intersection(self._starting))
            return
        if kill:
            handle.process.kill()
        elif self._socket.is_connected(worker):
            self._socket.send(worker, codec.encode_to_worker(messages.Leave(worker)))
        else:
            handle.process.terminate()
        self.kill_later(worker)

    def kill_later(self, worker: WorkerId) -> None:
        """Kill a worker that is to leave, if it still lives after ``--stop-timeout``."""
        handle = self.handles.get(worker)
        if handle is not None:
            loop = asyncio.get_running_loop()
            handle.stopping.append(loop.call_later(self._stop_timeout_s, handle.process.kill))

    async def stop_all(self, kill: bool = False) -> None:
        """Stop all workers, and wait for their ends. ``kill``: kill them at once."""
        for worker in [*self.handles, *self._starting]:
            self.stop(worker, kill)
        await self.all_started()
        while watchers := [handle.watcher for handle in self.handles.values() if handle.watcher is not None]:
            await asyncio.wait(watchers)


# --------------------------------------------------------------------------------------------------------------- result
# Results of ``launch()``: sent to the driver part by part.
#
# The file begins with a keyed checksum of the rest, which the worker writes last. So a result is known to be
# complete, and written by a worker of this job, before anything unpickles it.


_PART_BYTES = 1 << 20
_LOST = 1  # size sent without data: the driver then reports the result as lost


class Results:
    """The results of one host. ``key``: the key of the job's storage."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sizes: dict[int, int] = {}  # by slot; of verified results

    def part(self, fd: int | None, slot: int, offset: int) -> messages.Fetched:
        """Return the part at ``offset``. The first call reads the whole result: call it in a thread."""
        if fd is None:
            return messages.Fetched(slot, offset, b"", 0)
        if offset == 0:
            self._sizes[slot] = self._verified_size(fd)
        size = self._sizes.get(slot, _LOST)
        if size < 0:
            return messages.Fetched(slot, offset, b"", _LOST)
        return messages.Fetched(slot, offset, os.pread(fd, _PART_BYTES, RESULT_HEAD_BYTES + offset), size)

    def _verified_size(self, fd: int) -> int:
        """Return the size; 0 if nothing was returned; -1 if no worker of this job has written the file."""
        size = os.fstat(fd).st_size - RESULT_HEAD_BYTES
        if size < 0:
            return 0 if size == -RESULT_HEAD_BYTES else -1
        hasher = result_hasher(self._key)
        at = RESULT_HEAD_BYTES
        while data := os.pread(fd, _PART_BYTES, at):
            hasher.update(data)
            at += len(data)
        return size if hmac.compare_digest(os.pread(fd, RESULT_HEAD_BYTES, 0), hasher.digest()) else -1
