"""The agent of one host: carries out the driver's messages, reports events, and judges whether its workers are alive.

The phases of an agent::

    attach ──JobSpec──► serve ──Shutdown──► stop the workers, exit
                          │ ▲ driver lost; driver reconnected
                          ▼ │
                        orphan ──driver_timeout──► stop the workers, exit
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from elasticstate import commits, error_file
from elasticstate.agent.deleted_files import watch_files
from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.host_lock import lock_host
from elasticstate.agent.host_report import HostReporter
from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.identities import IdentityFiles
from elasticstate.agent.job_place import JobPlace
from elasticstate.agent.liveness import Liveness
from elasticstate.agent.output import Audience, Outputs
from elasticstate.agent.post_mortem import cause_of_death, count_oom_kills
from elasticstate.agent.preemption import PreemptionWatch
from elasticstate.agent.search import Stopped, find_driver
from elasticstate.agent.stale_files import clean_regularly
from elasticstate.agent.storage_allocator import StorageAllocator
from elasticstate.agent.supervisor import Supervisor
from elasticstate.agent.supply import Supply
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.agent.worker_process import WorkerProcess, environment_of_worker
from elasticstate.config import WorkerEnvironment
from elasticstate.core.types import WorkerId
from elasticstate.errors import CommitStorageError, OptionError
from elasticstate.net import messages, worker_codec
from elasticstate.net.launch import Launch
from elasticstate.net.link import AgentSocket
from elasticstate.net.trust import storage_key
from elasticstate.threads import in_thread

_GONE = "the driver is gone"


class Agent:
    """The agent of one host. ``await Agent(launch).run()`` returns the exit status."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._handles: dict[WorkerId, WorkerHandle] = {}
        self.outputs = Outputs(launch.host)
        self._complain = self.outputs.complain
        self._empty = asyncio.Event()  # set while there are no workers
        self._empty.set()
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self) -> int:
        self._loop, launch = asyncio.get_running_loop(), self._launch
        self._loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the driver decides what a closed terminal means
        try:
            place = self._place = JobPlace(launch)
        except (OSError, OptionError) as error:
            self._complain(f"cannot serve: {error}")
            return 1
        self._socket = AgentSocket(
            place.socket, self._admit, self._from_worker, lambda *asks: self._supply.give(*asks), self._complain
        )
        status, looking = 1, None
        try:
            self._driver = DriverConnection(launch)
            self._identities = IdentityFiles(launch.host, launch.connect_timeout_s, self._driver, self._complain)
            spec, has_notice = await find_driver(self._driver, launch.wait_s)
            # The driver handles Ctrl-C. A handler and not SIG_IGN, because workers would inherit SIG_IGN.
            self._loop.add_signal_handler(signal.SIGINT, lambda: None)
            self._spec, self._preemption = spec, PreemptionWatch(lambda message: self._driver.send(message), has_notice)
            await in_thread(place.serves, spec.job_id)
            if not await in_thread(Path(launch.directory).is_dir):
                raise NotADirectoryError(f"{launch.directory}, in which the job was started, is not there")
            self._local_address = launch.local_address or self._driver.local_address
            self._supervisor = Supervisor(self._handles, spec, self._driver, self.outputs, bool(launch.job_directory))
            looking = asyncio.ensure_future(self._supervisor.run())
            directory = self._commits = await lock_host(spec, launch.host, place.path, place.mark, self._driver)
            storage = self._storage = HostStorage(directory, spec.job_id, launch.host, self._complain)
            key = storage_key(launch.token, spec.job_id)
            self._supply = Supply(storage, self._handles, key, spec.call, self._begin, self._warn)
            self._reporter = HostReporter(storage)
            self._allocator = StorageAllocator(storage, launch.host, lambda: len(self._handles), self._complain)
            self._socket.open()
        except Stopped as signalled:
            status = signalled.status
        except (ConnectionError, OSError, ValueError) as error:
            self._complain(f"cannot serve: {error}")
        else:
            status = await self._live()
        if looking is not None:
            looking.cancel()
        await in_thread(place.leave)
        return status

    async def _live(self) -> int:
        """Serve until the job ends, then clean up. Return the exit status."""
        self._driver.send(self._reporter.host_report({}, self._loop.time()))
        self._preemption.begin(self._spec.preemption, self._launch, self._place.mark)
        tending = asyncio.ensure_future(clean_regularly(self._commits, self._spec.driver_timeout_s))
        watching = asyncio.ensure_future(watch_files(self._supply, self._place, self._socket, self._warn))
        status = await self._serve()
        tending.cancel()
        watching.cancel()
        await self._preemption.close()
        self._socket.close()
        self._allocator.close()
        self._identities.close()
        self._storage.close()
        await in_thread(self._commits.remove)
        await self._driver.close()
        return status

    async def _serve(self) -> int:
        """Serve until the driver sends Shutdown, or is unreachable for too long. Return the exit status."""
        reason = ""
        while not reason:
            try:
                await self._stop_all(await self._obey())
            except ConnectionError as error:  # noqa: PERF203
                self._complain(f"out of touch with the driver: {error}")
                self._release_hold()
                reason = await self._orphaned()
            else:
                return 0
        await self._stop_all(reason)
        if reason == _GONE:
            await in_thread(self._place.remove_job)
        return 1

    async def _obey(self) -> str:
        """Carry out the driver's messages until Shutdown. Return its reason.

        Raises ConnectionError when the driver is lost.
        """
        while True:
            order = await self._driver.receive()
            if isinstance(order, messages.Shutdown):
                return order.reason
            self._carry_out(order)

    async def _orphaned(self) -> str:
        """Let training continue while the agent reconnects to a driver. Return "" when connected, or a reason to stop.

        An agent without workers waits as well: the next driver may need its retained commits and exit reports.
        """
        limit_s = self._spec.driver_timeout_s
        try:
            await self._driver.establish(limit_s)
        except ConnectionRefusedError as refusal:
            self._complain(f"stops its workers: {refusal}")
            return str(refusal)
        except ConnectionError as error:
            self._complain(f"no driver for --driver-timeout of {limit_s:g} s: stops its workers ({error})")
            return _GONE
        self._driver.send(self._reporter.host_report(self._handles, self._loop.time()))
        self._preemption.tell()
        self.outputs.tell_again()
        self._supervisor.send_stamps()  # the lease is renewed before the driver publishes a new world
        return ""

    def _carry_out(self, order: messages.ToAgent) -> None:
        match order:
            case messages.StartWorker(worker, reserve_bytes):
                self._spawn(worker, reserve_bytes)
            case messages.StopWorker(worker, _, kill):
                self._stop(worker, kill)
            case messages.ToWorkers(workers, body):
                self._reporter.sent(body)
                data = worker_codec.encode_to_worker(body)
                for worker in list(self._handles) if workers is None else workers:
                    self._socket.send(worker, data)
                    if isinstance(body, messages.Leave):
                        self._kill_later(worker)
            case messages.WorldsOnHost(worlds):
                self._reporter.has_a_world()
                for worker, world in worlds:
                    self._supervisor.world_size = world.size
                    if worker in self._handles:
                        self._handles[worker].joined = world.generation
                        self._handles[worker].audience.rank = world.placement.rank
                        self._handles[worker].lasting.clear()
                    self._socket.send(worker, worker_codec.encode_to_worker(world))
            case messages.Identity():
                self._begin(self._identities.hand_on(order))
            case messages.Heard(number):
                self._supervisor.renew_lease(number)
            case messages.Fetch(slot, offset):
                self._begin(self._supply.send_result(slot, offset, self._driver))
            case _:
                self._complain(f"did not expect {type(order).__name__}")

    def _release_hold(self) -> None:
        """End a hold without the driver. Not after END: the workers may be on their way to its tick."""
        if self._reporter.held is not None:
            data = worker_codec.encode_to_worker(messages.Release(self._reporter.held))
            for worker in self._handles:
                self._socket.send(worker, data)

    # ------------------------------------------------------------------------------------------------- the processes

    def _spawn(self, worker: WorkerId, reserve_bytes: int) -> None:
        spec, launch = self._spec, self._launch
        self._reporter.started(worker)
        try:
            liveness = Liveness(self._storage.files(worker.slot).page, self._storage.owner(worker.slot))
            self._storage.make_result(worker.slot)
            error_name = commits.error_file(worker.slot)
            error_file.forget(error_name, self._commits.fd)
            audience = Audience(spec.output.only_ranks)
            pumps = self.outputs.pumps(worker, spec.output, audience)
            worker_environment = WorkerEnvironment(
                socket=self._place.socket,
                agent=self._place.mark,
                worker=worker,
                job=spec.job,
                job_id=spec.job_id,
                local_address=self._local_address,
                commits=str(self._commits.path / str(worker.slot)),
                reserve_bytes=reserve_bytes,
                notice_signals=spec.preemption.signals,
                backend=spec.backend,
            )
            environment = environment_of_worker(launch.environment, spec.environment, worker_environment)
            process = WorkerProcess(worker, spec.command, environment, launch.directory, *pumps)
        except (OSError, ValueError, CommitStorageError) as error:
            self.outputs.ended(worker)
            self._complain(f"cannot start {worker}: {error}")
            self._has_ended(messages.Exited(worker, 0, 127, None, f"cannot be started: {error}"))
            return
        liveness.set_lease(self._supervisor.lease.until_ns)
        handle = self._handles[worker] = WorkerHandle(process, liveness, audience, error_name, count_oom_kills())
        self._empty.clear()
        self._driver.send(messages.Started(worker, process.pid))
        handle.watcher = asyncio.ensure_future(self._watch(handle))
        if reserve_bytes:  # allocate while the worker boots
            self._begin(self._allocator.reserve(worker.slot, reserve_bytes, liveness.holds_commit))

    async def _watch(self, handle: WorkerHandle) -> None:
        process = handle.process
        ending = await process.ended()
        self._socket.drain(process.worker)
        handle.liveness.look(self._loop.time())
        self._supervisor.send_stamps()  # report its last commits before its exit
        for trouble in self.outputs.news():  # likewise the output that was dropped
            self._driver.send(trouble)
        for timer in handle.stopping:
            timer.cancel()
        del self._handles[process.worker]
        self.outputs.ended(process.worker)
        self._socket.disconnect(process.worker)
        written = error_file.read(handle.error_file, self._commits.fd)
        error, time_ns = cause_of_death(ending, written, count_oom_kills(), handle.oom_kills)
        exited = messages.Exited(process.worker, process.pid, ending.exit_code, ending.signal, error, time_ns)
        self._has_ended(exited)
        if not self._handles:
            self._empty.set()

    def _has_ended(self, exited: messages.Exited) -> None:
        self._reporter.ended(exited)
        self._driver.send(exited)

    def _stop(self, worker: WorkerId, kill: bool) -> None:
        """Stop a worker; after ``stop_timeout_s`` kill it.

        A connected worker receives Leave. Any other worker receives SIGTERM.
        """
        handle = self._handles.get(worker)
        if handle is None:
            return
        if kill:
            handle.process.kill()
        elif self._socket.is_connected(worker):
            self._socket.send(worker, worker_codec.encode_to_worker(messages.Leave(worker)))
        else:
            handle.process.terminate()
        self._kill_later(worker)

    def _kill_later(self, worker: WorkerId) -> None:
        handle = self._handles.get(worker)
        if handle is not None:
            handle.stopping.append(self._loop.call_later(self._spec.stop_timeout_s, handle.process.kill))

    async def _stop_all(self, reason: str) -> None:
        for worker in list(self._handles):
            self._stop(worker, kill=False)
        while self._handles:
            await self._empty.wait()

    # --------------------------------------------------------------------------------------------------- the workers

    def _admit(self, worker: WorkerId) -> str:
        return "" if worker in self._handles else "is no worker of this agent"

    def _from_worker(self, worker: WorkerId, message: messages.FromWorkerBody) -> None:
        handle, now = self._handles[worker], self._loop.time()
        match message:
            case messages.Hello():
                handle.liveness.begin(now)
            case messages.GrowBuffer(index, size):
                self._begin(self._grow_buffer(handle, index, size))
            case _:
                if isinstance(message, messages.WorkerPreemptionNotice):
                    handle.notice = message
                elif isinstance(message, messages.LASTING):
                    handle.lasting.append(message)
                self._driver.send(messages.FromWorker(worker, message))

    def _begin(self, what: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    def _warn(self, text: str) -> None:
        """Show a warning to the user, at the driver."""
        self._driver.send(messages.AgentWarning(text))
