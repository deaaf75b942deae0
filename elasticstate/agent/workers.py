"""Workers: the living workers of a host, from their start to the report of their end.

Their processes fork from the template process if they can.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from elasticstate import commits, tracebacks
from elasticstate.agent import exec_shim
from elasticstate.agent.host_job import HostJob
from elasticstate.agent.host_storage import HostStorage, StorageAllocator
from elasticstate.agent.python_command import for_new_process
from elasticstate.agent.supervisor import Supervisor
from elasticstate.agent.template_process import Template, TemplateError
from elasticstate.agent.worker import (
    Child,
    Liveness,
    WorkerHandle,
    WorkerProcess,
    cause_of_death,
    count_oom_kills,
    start_command,
)
from elasticstate.agent.worker_output import Audience
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import PlainPlace
from elasticstate.errors import CommitStorageError
from elasticstate.net import messages
from elasticstate.net.link import AgentSocket, ForkRequest, StoreListener
from elasticstate.net.names import is_loopback, selecting_interface
from elasticstate.options import WorkerEnvironment, plain_variables

STORE_PROGRAM = str(Path(exec_shim.__file__).parents[1] / "worker" / "plain_store.py")

FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Variable that lets torch record the last collectives of a process. Each costs about a microsecond."""


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
            handle = await self._start_worker(worker, order.reserve_bytes, place)
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
        end = (ending.exit_code, ending.signal, error, time_ns, handle.liveness.commits)
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

    async def _start_worker(self, worker: WorkerId, reserve_bytes: int, place: PlainPlace | None) -> WorkerHandle:
        """Start a worker. Raises OSError, ValueError or CommitStorageError if that fails."""
        options, storage = self._job.options, self._storage
        try:
            liveness = Liveness(storage.files(worker.slot).page, storage.owner(worker.slot))
            storage.make_result(worker.slot)
            error_name = commits.error_file(worker.slot)
            tracebacks.forget(error_name, storage.directory.fd)
            audience = Audience(options.only_ranks)
            pumps = self._job.outputs.pumps(worker, options, audience)
            child, pipes = await self._start_process(self._environment(worker, reserve_bytes, place))
            process = WorkerProcess(worker, child, *pumps, pipes)
        except (OSError, ValueError, CommitStorageError):
            self._job.outputs.ended(worker)
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
        command, directory = self._job.options.command, self._job.launch.directory
        if self._template is not None:
            try:
                request = ForkRequest(tuple(command), directory, environment)
                return await self._template.fork(request, stdout, stderr)
            except TemplateError as error:
                self._job.warn(
                    f"a worker starts as a new process, which imports torch anew: the template process {error}"
                )
        return start_command(for_new_process(command, directory, environment), environment, directory, stdout, stderr)

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
        plain = {} if place is None else plain_variables(place, job.spec.job, common, self._interface())
        return {**FLIGHT_RECORDER, **common, **plain, **own.variables()}

    def _interface(self) -> str | None:
        """Return the network interface by which other hosts reach this one; None if none do, or if it is not known."""
        return None if is_loopback(self._job.local_address) else selecting_interface(self._job.local_address)

    async def start_store(self, listener: StoreListener, stderr: int) -> Child:
        """Start the process that serves a store for plain workers (worker/plain_store.py). Raises OSError."""
        environment = self._job.environment()
        command = (sys.executable, STORE_PROGRAM, self._job.local_address, str(listener.port))
        if self._template is not None:
            try:
                request = ForkRequest(command, "/", environment)
                return await self._template.fork(request, listener.fileno(), stderr)
            except TemplateError:
                pass  # the workers' own starts have reported this
        return start_command(command, environment, "/", listener.fileno(), stderr)
