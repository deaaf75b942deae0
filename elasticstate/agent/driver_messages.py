"""DriverMessages: carries out the messages that an agent receives from its driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from elasticstate.agent.calls import Calls
from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.durable_uploads import DurableUploads
from elasticstate.agent.host_report import HostReporter
from elasticstate.agent.output import Outputs
from elasticstate.agent.plain_stores import PlainStores
from elasticstate.agent.running_tasks import RunningTasks
from elasticstate.agent.storage_allocator import StorageAllocator
from elasticstate.agent.supervisor import Supervisor
from elasticstate.agent.supply import Supply
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.agent.workers import Workers
from elasticstate.backends import AgentBackend
from elasticstate.copies.pusher import Target, Targets
from elasticstate.copies.service import HostCopies
from elasticstate.core.types import SlotId, WorkerId
from elasticstate.net import messages, worker_codec
from elasticstate.net.link import AgentSocket


class DriverMessages:
    """Executor of the driver's messages, except JobSpec and Shutdown."""

    def __init__(
        self,
        driver: DriverConnection,
        workers: Workers,
        socket: AgentSocket,
        supervisor: Supervisor,
        reporter: HostReporter,
        supply: Supply,
        allocator: StorageAllocator,
        backend: AgentBackend,
        stores: PlainStores,
        copies: HostCopies,
        outputs: Outputs,
        tasks: RunningTasks,
        calls: Calls,
        durable: DurableUploads,
    ) -> None:
        self._driver = driver
        self._workers = workers
        self._socket = socket
        self._supervisor = supervisor
        self._reporter = reporter
        self._supply = supply
        self._allocator = allocator
        self._backend = backend
        self._stores = stores
        self._copies = copies
        self._outputs = outputs
        self._tasks = tasks
        self._calls = calls
        self._durable = durable

    def carry_out(self, message: messages.ToAgent) -> None:
        match message:
            case messages.StartWorker(_, reserve_bytes, place):
                if place is not None:
                    self._stores.use(place)
                self._tasks.begin(self._reserve(self._workers.start(message), reserve_bytes))
            case messages.StopWorker(worker, _, kill):
                self._workers.stop(worker, kill)
            case messages.ToWorkers(workers, body):
                self._send(workers, body)
            case messages.WorldsOnHost(worlds):
                self._stores.close()
                self._publish(worlds)
            case messages.BackendOrder(data):
                self._tasks.begin(self._backend.order(data))
            case messages.ReplicateOrder(commit, targets):
                self._allocator.keep_copies(len(targets))
                self._copies.replicate(commit, _by_slot(targets))
            case messages.StopReplicationOrder():
                self._copies.stop_replication()
            case messages.ForgetCopiesOrder(before, besides):
                self._copies.forget(before, besides)
            case messages.Acknowledgement(number):
                self._supervisor.renew_lease(number)
            case messages.WatchCalls():
                self._calls.watch(message, asyncio.get_running_loop().time())
            case messages.Fetch(slot, offset):
                self._tasks.begin(self._supply.send_result(slot, offset, self._driver))
            case messages.SaveDurable() | messages.CompleteDurable():
                self._durable.begin(message)
            case messages.DropDurable(folder):
                self._durable.drop(folder)
            case messages.FetchOutput(worker):
                self._driver.send(self._outputs.tail(worker))
            case _:
                self._outputs.complain(f"received an unexpected message from the driver: {type(message).__name__}")

    def release_hold(self) -> None:
        """End a hold without the driver. Not after END: the workers may be on their way to its tick."""
        if self._reporter.held is not None:
            data = worker_codec.encode_to_worker(messages.Release(self._reporter.held))
            for worker in self._workers.handles:
                self._socket.send(worker, data)

    async def _reserve(self, starting: Awaitable[WorkerHandle | None], reserve_bytes: int) -> None:
        """Allocate the commit storage of a new worker while it boots."""
        handle = await starting
        if handle is not None and reserve_bytes:
            slot, holds_commit = handle.process.worker.slot, handle.liveness.holds_commit
            await self._allocator.reserve(slot, reserve_bytes, holds_commit)

    def _send(self, workers: tuple[WorkerId, ...] | None, body: messages.ToWorkerBody) -> None:
        self._reporter.sent(body)
        data = worker_codec.encode_to_worker(body)
        for worker in list(self._workers.handles) if workers is None else workers:
            self._socket.send(worker, data)
            if isinstance(body, messages.Leave):
                self._workers.kill_later(worker)

    def _publish(self, worlds: tuple[tuple[WorkerId, messages.WorldMessage], ...]) -> None:
        self._reporter.has_a_world()
        for worker, world in worlds:
            self._supervisor.world_size = world.size
            handle = self._workers.handles.get(worker)
            if handle is not None:
                handle.joined = world.generation
                handle.audience.rank = world.placement.rank
                handle.lasting.clear()
            self._socket.send(worker, worker_codec.encode_to_worker(world))


def _by_slot(targets: tuple[tuple[SlotId, str, str], ...]) -> Targets:
    """Return the other hosts that are to keep a copy of each slot."""
    found: dict[int, list[Target]] = {}
    for slot_id, host, address in targets:
        others = found.setdefault(slot_id.slot, [])
        if host != slot_id.host:
            others.append(Target(host, address))
    return found
