"""Workers: the living workers of a host, from their start to the report of their end."""

from __future__ import annotations

import asyncio

from elasticstate import error_file
from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.host_report import HostReporter
from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.output import Outputs
from elasticstate.agent.post_mortem import cause_of_death, count_oom_kills
from elasticstate.agent.storage_allocator import StorageAllocator
from elasticstate.agent.supervisor import Supervisor
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.agent.worker_starter import WorkerStarter
from elasticstate.core.types import WorkerId
from elasticstate.errors import CommitStorageError
from elasticstate.net import messages, worker_codec
from elasticstate.net.link import AgentSocket


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
            self._report_exit(messages.Exited(worker, 0, 127, None, f"could not be started: {error}"))
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
        written = error_file.read(handle.error_file, self._storage.directory.fd)
        error, time_ns = cause_of_death(ending, written, count_oom_kills(), handle.oom_kills)
        end = (ending.exit_code, ending.signal, error, time_ns, handle.liveness.commits)
        self._report_exit(messages.Exited(process.worker, process.pid, *end))

    def _report_exit(self, exited: messages.Exited) -> None:
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
            self._socket.send(worker, worker_codec.encode_to_worker(messages.Leave(worker)))
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
