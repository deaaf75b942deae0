"""The agent of one host: carries out the driver's messages, reports events, and judges whether its workers are alive.

The phases of an agent::

    attach ──JobSpec──► serve ──Shutdown──► stop the workers, exit
                          │ ▲ driver lost; driver reconnected
                          ▼ │
                        orphan ──driver_timeout, or refused──► stop the workers, exit

At its end, an agent removes the commits of its host. A refused agent leaves them to the next agent of the host, because
no other host may have a commit as new. But if the driver had stopped the agent before, the agent removes them.

This module has the phase *attach*, which sets up all parts, and the end. agent.py has the other phases.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elasticstate.agent.connection import DriverConnection, Stopped, find_driver
from elasticstate.agent.copies import open_copies
from elasticstate.agent.deleted_files import watch_files
from elasticstate.agent.durable_uploads import DurableUploads
from elasticstate.agent.files import JobPlace, clean_regularly, lock_host
from elasticstate.agent.output import Outputs
from elasticstate.agent.plain_stores import PlainStores
from elasticstate.agent.preemption import PreemptionWatch
from elasticstate.agent.storage import HostStorage, StorageAllocator
from elasticstate.agent.supervisor import Calls, Supervisor
from elasticstate.agent.supply import Supply
from elasticstate.agent.template import Template
from elasticstate.agent.worker import WorkerHandle, environment_of_workers
from elasticstate.agent.workers import (
    HostReporter,
    Workers,
    WorkerStarter,
    is_python,
    reason_against_template,
    script_directory,
)
from elasticstate.backends import AgentBackend, AgentServices, agent_part
from elasticstate.commits import CommitDirectory
from elasticstate.copies.pusher import HostCopies, Target, Targets
from elasticstate.core.ids import SlotId, WorkerId
from elasticstate.core.types import number_of
from elasticstate.errors import OptionError
from elasticstate.net import codec, messages
from elasticstate.net.agent_status import AgentStatus
from elasticstate.net.control import Refused
from elasticstate.net.link import AgentSocket
from elasticstate.net.messages import (
    AgentWarning,
    CommitDamaged,
    CopyDropped,
    CopyKept,
    JobSpec,
    Launch,
    Shutdown,
)
from elasticstate.net.names import is_loopback, outward_address
from elasticstate.net.trust import storage_key
from elasticstate.options import Options, agent_variable
from elasticstate.options.kinds import split_address
from elasticstate.threads import in_thread

# -------------------------------------------------------------------------------------------------------- running tasks
# RunningTasks: tasks of an agent that nothing waits for.


class RunningTasks:
    """Owner of running tasks. asyncio itself keeps only weak references to tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# ------------------------------------------------------------------------------------------------------ driver messages
# DriverMessages: carries out the messages that an agent receives from its driver.


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
            case messages.StopReplication():
                self._copies.stop_replication()
            case messages.ForgetCopies(before, besides):
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
            data = codec.encode_to_worker(messages.Release(self._reporter.held))
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
        data = codec.encode_to_worker(body)
        for worker in list(self._workers.handles) if workers is None else workers:
            self._socket.send(worker, data)
            if isinstance(body, messages.Leave):
                self._workers.kill_later(worker)

    def _publish(self, worlds: tuple[tuple[WorkerId, messages.WorldView], ...]) -> None:
        self._reporter.has_a_world()
        for worker, world in worlds:
            self._supervisor.world_size = world.size
            handle = self._workers.handles.get(worker)
            if handle is not None:
                handle.joined = world.generation
                handle.audience.rank = world.placement.rank
                handle.lasting.clear()
            self._socket.send(worker, codec.encode_to_worker(world))


def _by_slot(targets: tuple[tuple[SlotId, str, str], ...]) -> Targets:
    """Return the other hosts that are to keep a copy of each slot."""
    found: dict[int, list[Target]] = {}
    for slot_id, host, address in targets:
        others = found.setdefault(slot_id.slot, [])
        if host != slot_id.host:
            others.append(Target(host, address))
    return found


# -------------------------------------------------------------------------------------------------------------- service
# Service: an agent's service for its driver, and its behaviour without one.


class ServiceEnd(NamedTuple):
    """End of an agent's service. ``keeps_commits``: the commits stay for the next agent of this host."""

    status: int
    keeps_commits: bool = False


class Service:
    """The phases *serve* and *orphan* of an agent (see agent.py)."""

    def __init__(
        self,
        driver: DriverConnection,
        driver_timeout_s: float,
        messages: DriverMessages,
        workers: Workers,
        supervisor: Supervisor,
        reporter: HostReporter,
        preemption: PreemptionWatch,
        outputs: Outputs,
        place: JobPlace,
        killed: asyncio.Event,
    ) -> None:
        """``killed``: set when the user wants this agent to end at once."""
        self._driver = driver
        self._driver_timeout_s = driver_timeout_s
        self._messages = messages
        self._workers = workers
        self._supervisor = supervisor
        self._reporter = reporter
        self._preemption = preemption
        self._outputs = outputs
        self._place = place
        self._killed = killed

    async def run(self) -> ServiceEnd:
        """Serve until the driver sends Shutdown, refuses this agent, or is away for too long, or the user ends it.

        In the last case the commits stay, as those of an agent that is killed: other hosts may have none as new.
        """
        serving, killed = asyncio.ensure_future(self._serve_drivers()), asyncio.ensure_future(self._killed.wait())
        await asyncio.wait({serving, killed}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if serving.done():
            return serving.result()
        serving.cancel()
        await asyncio.wait({serving})
        await self._workers.stop_all(kill=True)
        return ServiceEnd(128 + signal.SIGINT, keeps_commits=True)

    async def _serve_drivers(self) -> ServiceEnd:
        end = None
        while end is None:
            try:
                await self._serve()
            except ConnectionError as error:  # noqa: PERF203
                self._outputs.complain(f"lost the driver: {error}")
                self._messages.release_hold()
                end = await self._reconnect()
            else:
                return ServiceEnd(0)
        return end

    async def _serve(self) -> None:
        """Carry out the driver's messages until Shutdown; then stop the workers.

        Raises ConnectionError when the driver is lost.
        """
        while not isinstance(message := await self._driver.receive(), Shutdown):
            self._messages.carry_out(message)
        await self._workers.stop_all()

    async def _reconnect(self) -> ServiceEnd | None:
        """Let training continue while the agent reconnects to a driver. Return None when connected.

        An agent without workers waits as well: the next driver may need its retained commits and exit reports.
        """
        try:
            await self._driver.establish(self._driver_timeout_s)
        except Refused as refusal:
            self._outputs.complain(f"stopping the workers: {refusal}")
            await self._workers.stop_all()
            return ServiceEnd(1, keeps_commits=not refusal.is_stopped)
        except ConnectionError as error:
            self._outputs.complain(
                f"stopping the workers: no driver within --driver-timeout of {self._driver_timeout_s:g} s ({error})"
            )
            await self._workers.stop_all()
            await in_thread(self._place.remove_job)
            return ServiceEnd(1)
        await self._workers.all_started()
        self.send_host_report()
        self._preemption.report()
        self._outputs.report_again()
        self._supervisor.send_stamps()  # the lease is renewed before the driver publishes a new world
        return None

    def send_host_report(self) -> None:
        """Send the first message to a driver that has accepted this agent."""
        now = asyncio.get_running_loop().time()
        self._driver.send(self._reporter.host_report(self._workers.handles, now))


# ------------------------------------------------------------------------------------------------------ worker messages
# WorkerMessages: handles the messages that an agent receives from its workers.


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
                self._driver.send(messages.WorkerUsesRun(worker))
            case messages.GrowBuffer(index, size):
                self._tasks.begin(self._grow_buffer(handle, index, size))
            case messages.Attached():
                self._reporter.attached(worker, message)
                self._driver.send(messages.FromWorker(worker, message))
            case messages.CallReport():
                self._calls.received(handle, message, asyncio.get_running_loop().time())
            case messages.Synced() | messages.CommitSize() | messages.BackendRequest():
                if isinstance(message, messages.CommitSize):
                    self._allocator.expect(worker.slot, message.bytes, message.to_come)
                self._driver.send(messages.BesidesCore(worker, message))
            case messages.RequestStorage():
                pass  # not on this connection
            case _:
                if isinstance(message, messages.First):
                    self._allocator.begin_ticks()
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
        self._socket.send(worker, codec.encode_to_worker(messages.BufferGrown(index, length, error)))


# ---------------------------------------------------------------------------------------------------------------- agent


@dataclass(frozen=True, slots=True)
class _Attachment:
    """The parts of an agent that has found its driver and locked its host."""

    spec: JobSpec
    driver: DriverConnection
    local_address: str  # at which other hosts reach this one
    preemption: PreemptionWatch
    supervisor: Supervisor
    commits: CommitDirectory

    def warn(self, text: str) -> None:
        """Show a warning to the user, at the driver."""
        self.driver.send(AgentWarning(text))


@dataclass(frozen=True, slots=True)
class _AgentParts:
    """The other parts, which need the commit storage."""

    storage: HostStorage
    allocator: StorageAllocator
    socket: AgentSocket
    supply: Supply
    backend: AgentBackend
    stores: PlainStores
    copies: HostCopies
    durable: DurableUploads
    service: Service


class Agent:
    """The agent of one host. ``await Agent(launch).run()`` returns the exit status."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.outputs = Outputs(launch.host)
        self._handles: dict[WorkerId, WorkerHandle] = {}  # living workers
        self._supervision: asyncio.Task[None] | None = None
        self._template: Template | None = None
        self._driver: DriverConnection | None = None
        self._job = ""  # "": this agent does not serve a driver yet
        self._is_interrupted = False  # by Ctrl-C
        self._killed = asyncio.Event()  # set by a second Ctrl-C

    @property
    def status(self) -> AgentStatus:
        """The answer to ``elasticrun status --agent``."""
        host = f"agent of host {self._launch.host}"
        if not self._job or self._driver is None:
            return AgentStatus(False, f"{host}: waits for a driver at {', '.join(self._launch.addresses)}")
        if not self._driver.is_established:
            return AgentStatus(False, f"{host}: has lost the driver of job {self._job}, and looks for it")
        return AgentStatus(True, f"{host}: serves job {self._job}, {number_of(len(self._handles), 'worker')}")

    async def run(self) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)  # the driver's decision
        try:
            place = await in_thread(JobPlace, self._launch)
        except (OSError, OptionError) as error:
            self.outputs.complain(f"could not start: {error}")
            return 1
        status = 1
        try:
            attachment = await self._attach(place)
            parts = self._assemble(place, attachment)
        except Stopped as signalled:
            status = signalled.status
        except (ConnectionError, OSError, ValueError) as error:
            self.outputs.complain(f"could not start: {error}")
        else:
            status = await self._serve(place, attachment, parts)
        if self._supervision is not None:
            self._supervision.cancel()
        if self._template is not None:
            await self._template.close()
        await in_thread(place.leave)
        return status

    async def _attach(self, place: JobPlace) -> _Attachment:
        """Find the driver, and lock this host. Raises Stopped, OSError (also ConnectionError) or ValueError."""
        launch = self._launch
        driver = self._driver = DriverConnection(launch)
        spec, received = await find_driver(driver, launch.wait_s)
        preemption = PreemptionWatch(self._launch.host, driver.send)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupted, preemption, driver)
        if signal.SIGTERM in received:
            preemption.signalled(signal.SIGTERM)
        for _ in range(received.count(signal.SIGINT)):
            self._interrupted(preemption, driver)
        await in_thread(place.serves, spec.job_id)
        if not await in_thread(Path(launch.directory).is_dir):
            raise NotADirectoryError(f"{launch.directory}, the directory of the job, does not exist on this host")
        self._template = self._start_template(spec, place, driver)
        local_address = launch.local_address or _seen_at(driver.local_address, spec.options)
        supervisor = Supervisor(self._handles, spec.options, driver, self.outputs, bool(launch.job_directory))
        self._supervision = asyncio.ensure_future(supervisor.run())
        commits = await lock_host(spec, launch.host, place.path, place.mark, driver)
        return _Attachment(spec, driver, local_address, preemption, supervisor, commits)

    def _interrupted(self, preemption: PreemptionWatch, driver: DriverConnection) -> None:
        """Drain this host at the first Ctrl-C, and end at the second one. The workers, in sessions of their own, get
        neither."""
        if not self._launch.is_joining:
            return  # the driver handles Ctrl-C; without this handler, workers would inherit that SIGINT is ignored
        if self._is_interrupted:
            self.outputs.complain("SIGINT again: killing the workers.")
            self._killed.set()
            return
        self._is_interrupted = True
        when = "at the end of a tick" if driver.is_established else "when the driver is back"
        self.outputs.complain(f"SIGINT: the workers leave the job {when}. A second Ctrl-C kills them at once.")
        preemption.signalled(signal.SIGINT)

    def _start_template(self, spec: JobSpec, place: JobPlace, driver: DriverConnection) -> Template | None:
        """Start the template process early, unless it is switched off or of no use for this command."""
        options, launch = spec.options, self._launch
        if options.preload is None or not is_python(options.command):
            return None
        environment = environment_of_workers(launch.environment, spec.environment)
        reason = reason_against_template(options.command, launch.directory, environment)
        if reason:
            driver.send(AgentWarning(f"workers do not fork from the template process, but import torch anew: {reason}"))
            return None
        name, mark = agent_variable(place.mark)
        template = Template(
            {**environment, name: mark},
            launch.directory,
            script_directory(options.command, launch.directory),
            options.preload,
            options.heartbeat_timeout_s,
            self.outputs.complain,
            lambda text: driver.send(AgentWarning(text)),
            lambda pid: any(handle.process.pid == pid for handle in self._handles.values()),
        )
        template.start()
        return template

    def _assemble(self, place: JobPlace, attachment: _Attachment) -> _AgentParts:
        """Make the other parts, and listen for workers. Raises OSError or ValueError."""
        launch, outputs, handles, tasks = self._launch, self.outputs, self._handles, RunningTasks()
        spec, driver, supervisor = attachment.spec, attachment.driver, attachment.supervisor

        def refusal(worker: WorkerId) -> str:
            return "" if worker in handles else "is not a worker of this agent"

        backend = agent_part(spec.options.backend)(
            AgentServices(
                host=launch.host,
                connect_timeout_s=launch.connect_timeout_s,
                trust=driver.trust,
                driver_address=lambda: driver.driver_address,
                warn=attachment.warn,
                log=outputs.complain,
            )
        )
        storage = HostStorage(attachment.commits, spec.job_id, launch.host, outputs.complain)
        key = storage_key(launch.token, spec.job_id)
        copies = open_copies(
            storage,
            spec.job_id,
            launch.host,
            key,
            attachment.local_address,
            launch.connect_timeout_s,
            spec.options.replica_rate,
            lambda slot, commit: driver.send(CopyKept(launch.host, slot, commit)),
            lambda keeper, slot, commit, reason: driver.send(CopyDropped(keeper, slot, commit, reason)),
            lambda slot, commit: driver.send(CommitDamaged(slot, commit)),
            outputs.complain,
        )
        supervisor.copy_figures = copies.figures
        supply = Supply(storage, handles, key, spec.call, tasks.begin, attachment.warn, copies.share)
        allocator = StorageAllocator(
            storage,
            launch.host,
            lambda: min(1, len(handles)) if spec.options.one_copy_per_host else len(handles),
            outputs.complain,
            copies.store,
        )
        worker_messages: WorkerMessages
        socket = AgentSocket(
            place.socket,
            refusal,
            lambda worker, message: worker_messages.received(worker, message),
            supply.give,
            outputs.complain,
        )
        starter = WorkerStarter(
            launch, spec, place, storage, outputs, attachment.local_address, self._template, attachment.warn
        )
        stores = PlainStores(attachment.local_address, starter.start_store, driver.send, outputs.complain)
        reporter = HostReporter(storage, stores, copies)
        worker_messages = WorkerMessages(handles, driver, socket, allocator, tasks, stores, reporter, supervisor.calls)
        workers = Workers(
            handles,
            starter,
            driver,
            socket,
            supervisor,
            reporter,
            outputs,
            storage,
            allocator,
            spec.options.stop_timeout_s,
        )
        environment = environment_of_workers(launch.environment, spec.environment)
        environment.update([agent_variable(place.mark)])
        durable = DurableUploads(launch.host, spec, storage, copies.store, key, environment, driver)
        messages = DriverMessages(
            driver,
            workers,
            socket,
            supervisor,
            reporter,
            supply,
            allocator,
            backend,
            stores,
            copies,
            outputs,
            tasks,
            supervisor.calls,
            durable,
        )
        timeout_s, preemption = spec.options.driver_timeout_s, attachment.preemption
        service = Service(
            driver, timeout_s, messages, workers, supervisor, reporter, preemption, outputs, place, self._killed
        )
        socket.open()
        return _AgentParts(storage, allocator, socket, supply, backend, stores, copies, durable, service)

    async def _serve(self, place: JobPlace, attachment: _Attachment, parts: _AgentParts) -> int:
        """Serve until the job ends, then clean up. Return the exit status."""
        options, commits = attachment.spec.options, attachment.commits
        parts.service.send_host_report()
        self._job = attachment.spec.job
        attachment.preemption.begin(options, self._launch, place.mark)
        cleaning = asyncio.ensure_future(clean_regularly(commits, options.driver_timeout_s))
        watching = asyncio.ensure_future(
            watch_files(parts.supply, commits, parts.copies, place, parts.socket, attachment.warn)
        )
        end = await parts.service.run()
        cleaning.cancel()
        watching.cancel()
        await attachment.preemption.close()
        parts.socket.close()
        parts.stores.close()
        parts.allocator.close()
        await parts.durable.close()
        parts.backend.close()
        await in_thread(parts.copies.close)
        parts.storage.close()
        await in_thread(commits.close if end.keeps_commits else commits.remove)
        await attachment.driver.close()
        return end.status


def _seen_at(address: str, options: Options) -> str:
    """Return the address at which other hosts reach this one. ``address``: that of its connection to the driver.

    An agent on the driver's host may dial in over the loopback interface, while other hosts cannot.
    """
    if options.listen is None or not is_loopback(address):
        return address
    listens_at, _ = split_address(options.listen)
    return address if is_loopback(listens_at) else outward_address() or address
