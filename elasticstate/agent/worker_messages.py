"""WorkerMessages: handles the messages that an agent receives from its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from elasticstate.agent.calls import Calls
from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.host_report import HostReporter
from elasticstate.agent.plain_stores import PlainStores
from elasticstate.agent.running_tasks import RunningTasks
from elasticstate.agent.storage_allocator import StorageAllocator
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.core.types import WorkerId
from elasticstate.net import messages, worker_codec
from elasticstate.net.link import AgentSocket


class WorkerMessages:
    """Handler of the messages of workers. Most of them go to the driver."""

    def __init__(
        self,
        handles: Mapping[WorkerId, WorkerHandle],
        driver: DriverConnection,
        socket: AgentSocket,
        allocator: StorageAllocator,
        tasks: RunningTasks,
        stores: PlainStores,
        reporter: HostReporter,
        calls: Calls,
    ) -> None:
        self._handles = handles
        self._driver = driver
        self._socket = socket
        self._allocator = allocator
        self._tasks = tasks
        self._stores = stores
        self._reporter = reporter
        self._calls = calls

    def received(self, worker: WorkerId, message: messages.FromWorkerBody) -> None:
        """Handle a message of a worker of this agent."""
        handle = self._handles[worker]
        match message:
            case messages.Hello():
                handle.liveness.begin(asyncio.get_running_loop().time())
            case messages.RunUsed():
                handle.joined = 0  # the place with which it was started does not count any more
                self._stores.close_next()
                self._driver.send(messages.FromWorker(worker, message))
            case messages.GrowBuffer(index, size):
                self._tasks.begin(self._grow_buffer(handle, index, size))
            case messages.Attached():
                self._reporter.attached(worker, message)
                self._driver.send(messages.FromWorker(worker, message))
            case messages.CallReport():
                self._calls.received(handle, message, asyncio.get_running_loop().time())
            case _:
                if isinstance(message, messages.First):
                    self._allocator.begin_ticks()
                if isinstance(message, messages.CommitSize):
                    self._allocator.expect(worker.slot, message.bytes, message.to_come)
                if isinstance(message, messages.WorkerPreemptionNotice):
                    handle.notice = message
                elif isinstance(message, messages.LASTING):
                    handle.lasting.append((asyncio.get_running_loop().time(), message))
                self._driver.send(messages.FromWorker(worker, message))

    async def _grow_buffer(self, handle: WorkerHandle, index: int, size_bytes: int) -> None:
        handle.waits += 1
        worker = handle.process.worker
        try:
            length, error = await self._allocator.make(
                worker.slot, min(index, 1), size_bytes, handle.liveness.holds_commit
            )
        finally:
            handle.waits -= 1
        self._socket.send(worker, worker_codec.encode_to_worker(messages.BufferGrown(index, length, error)))
