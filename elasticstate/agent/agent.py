"""The agent of one host: carries out the driver's messages, reports events, and judges whether its workers are alive.

The phases of an agent::

    attach ──JobSpec──► serve ──Shutdown──► stop the workers, exit
                          │ ▲ driver lost; driver reconnected
                          ▼ │
                        orphan ──driver_timeout, or refused──► stop the workers, exit

``Agent`` is the agent from its launch to its exit, ``Service`` its phases *serve* and *orphan*.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from elasticstate.agent.durable_uploads import DurableUploads
from elasticstate.agent.health_check import HealthCheck
from elasticstate.agent.host_job import HostJob, JobPlace, clean_regularly, is_watched
from elasticstate.agent.host_storage import HostStorage, StorageAllocator, Supply
from elasticstate.agent.preemption import PreemptionWatch
from elasticstate.agent.standby import Standby
from elasticstate.agent.supervisor import Supervisor, sealed_commits
from elasticstate.agent.template_process import Template, start_template
from elasticstate.agent.worker_output import Outputs
from elasticstate.agent.workers import PlainStores, WorkerHandle, Workers
from elasticstate.backends import AgentServices, agent_part
from elasticstate.commits import CommitDirectory
from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.core.types import number_of
from elasticstate.errors import OptionError
from elasticstate.failures import signal_name
from elasticstate.machine import slots_of_this_machine
from elasticstate.net import messages
from elasticstate.net.control import DriverConnection, Refused
from elasticstate.net.link import AgentSocket, AgentStatus, answering
from elasticstate.net.messages import Launch
from elasticstate.net.reach import Probes
from elasticstate.net.trust import read_token
from elasticstate.replicas.pusher import HostReplicas, Target, Targets
from elasticstate.threads import in_thread
from elasticstate.writing import BLOCKED_S


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
            service = await self._attach(place)
        except Stopped as signalled:
            status = signalled.status
        except (ConnectionError, OSError, ValueError, OptionError) as error:
            self.outputs.complain(f"could not start: {error}")
            if self._driver is not None:
                self._driver.send(messages.CouldNotStart(str(error)))
                await self._driver.close()
        else:
            status = await service.run(self._killed)
        if self._supervision is not None:
            self._supervision.cancel()
        if self._template is not None:
            await self._template.close()
        await in_thread(place.leave)
        return status

    async def _attach(self, place: JobPlace) -> Service:
        """Find the driver, lock this host, and begin to serve.

        Raises Stopped, OSError (also ConnectionError), ValueError or OptionError.
        """
        launch = self._launch
        driver = self._driver = DriverConnection(launch)
        spec, received = await find_driver(driver, launch.wait_s)
        job = HostJob(launch, spec, driver, place, self.outputs, self._handles)
        preemption = PreemptionWatch(job)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupted, preemption, driver)
        if signal.SIGTERM in received:
            preemption.signalled(signal.SIGTERM)
        for _ in range(received.count(signal.SIGINT)):
            self._interrupted(preemption, driver)
        await in_thread(place.serves, spec.job_id)
        if not await in_thread(Path(launch.directory).is_dir):
            raise NotADirectoryError(f"{launch.directory}, the directory of the job, does not exist on this host")
        is_witness = launch.is_joining and not launch.slots
        self._template = None if is_witness else await start_template(job)
        supervisor = Supervisor(job)
        self._supervision = asyncio.ensure_future(supervisor.run())
        commits = await job.lock_host()
        service = Service(job, commits, supervisor, preemption, self._template)
        await service.listen()
        self._job = spec.job
        return service

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


class Stopped(Exception):
    """SIGINT or SIGTERM arrived before a driver was found. ``status``: the exit status for that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.status = 128 + number


async def find_driver(driver: DriverConnection, wait_s: float) -> tuple[messages.JobSpec, list[int]]:
    """Return the driver's first message, and the signals that arrived during the greeting.

    Until a driver is found, nothing depends on the agent: a signal ends it. Raises Stopped, and all that ``establish``
    of the connection raises.
    """
    loop = asyncio.get_running_loop()
    finding = asyncio.ensure_future(driver.establish(wait_s))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        driver.is_sought = False
        if not driver.is_connected:
            finding.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait({finding})
        if received and (finding.cancelled() or finding.exception() is not None):
            raise Stopped(received[0])
        return finding.result(), received
    finally:
        finding.cancel()
        for number in numbers:
            loop.remove_signal_handler(number)


class _End(NamedTuple):
    """End of an agent's service. ``keeps_commits``: the commits stay for the next agent of this host."""

    status: int
    keeps_commits: bool = False
    is_driverless: bool = False  # no driver will remove the job's directory


class Service:
    """Service of an agent for its job: all parts of the agent, and the messages of driver and workers."""

    def __init__(
        self,
        job: HostJob,
        commits: CommitDirectory,
        supervisor: Supervisor,
        preemption: PreemptionWatch,
        template: Template | None,
    ) -> None:
        """Make the parts. Raises OSError or ValueError."""
        launch, driver = job.launch, job.driver
        self._job = job
        self._commits = commits
        self._supervisor = supervisor
        self._preemption = preemption
        self._backend = agent_part(job.options.backend)(
            AgentServices(
                host=launch.host,
                connect_timeout_s=launch.connect_timeout_s,
                trust=driver.trust,
                driver_address=lambda: driver.driver_address,
                warn=job.warn,
                log=job.log,
            )
        )
        self._storage = HostStorage(commits, job.spec.job_id, launch.host, job.log)
        self._copies = self._open_copies()
        supervisor.copy_figures = self._copies.figures
        self._supply = Supply(job, self._storage, self._copies.store)
        self._allocator = StorageAllocator(
            self._storage,
            lambda: min(1, len(job.handles)) if job.options.one_copy_per_host else len(job.handles),
            self._copies.store,
        )
        self._socket = AgentSocket(job.place.socket, self._refusal, self._received, self._supply.give, job.log)
        self._workers = Workers(job, self._storage, self._allocator, self._socket, supervisor, template)
        self._stores = PlainStores(job, template)
        self._durable = DurableUploads(job, self._storage, self._copies.store)
        self._standby = Standby(job)
        self._probes = Probes(launch.host, driver.send)
        self._health = HealthCheck(job)
        self._held: int | None = None  # generation on hold, if any
        # For the report to a new driver:
        self._attached: tuple[tuple[WorkerId, messages.Attached], ...] = ()  # the newest report
        self._gate = 0  # newest generation whose exit gate is open
        self._ended = 0  # newest generation that was ended at once, not at a tick

    async def listen(self) -> None:
        """Listen for workers. Raises OSError."""
        await in_thread(self._socket.bind)
        self._socket.serve()

    def _open_copies(self) -> HostReplicas:
        """Take over the copies that this host keeps, and serve them. Raises OSError."""
        job, loop = self._job, asyncio.get_running_loop()

        def on_loop(callback: Callable[..., None], *arguments: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(partial(callback, *arguments))

        def send(message: Callable[..., messages.FromAgent], *fields: object) -> None:
            on_loop(job.driver.send, message(*fields))

        copies = HostReplicas(
            host=job.launch.host,
            job_id=job.spec.job_id,
            key=job.key,
            directory=self._storage.directory.fd,
            slots=self._storage.slots(),
            timeout_s=job.launch.connect_timeout_s,
            on_kept=partial(send, messages.CopyKept, job.launch.host),
            on_dropped=partial(send, messages.CopyDropped),
            on_damaged=partial(send, messages.CommitDamaged),
            log=partial(on_loop, job.log),
            rate_bytes_per_s=job.options.replica_rate,
        )
        try:
            copies.start(job.local_address)
        except BaseException:
            copies.close()
            raise
        return copies

    # ---------------------------------------------------------------------------------------------------- the phases

    async def run(self, killed: asyncio.Event) -> int:
        """Serve until the job ends, then clean up. Return the exit status.

        ``killed``: set when the user wants this agent to end at once. The commits then stay, as those of an agent that
        is killed: other hosts may have none as new.
        """
        self._send_host_report()
        self._preemption.begin()
        self._supervisor.send_stamps()  # a lease begins before the driver publishes the first world
        beside = [
            asyncio.ensure_future(clean_regularly(self._commits, self._job.options.driver_timeout_s)),
            asyncio.ensure_future(self._supply.watch_files(self._socket)),
            asyncio.ensure_future(self._supervisor.measure_use()),
        ]
        serving, killing = asyncio.ensure_future(self._serve_drivers()), asyncio.ensure_future(killed.wait())
        await asyncio.wait({serving, killing}, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if serving.done():
            end = serving.result()
        else:
            serving.cancel()
            await asyncio.wait({serving})
            await self._workers.stop_all(kill=True)
            end = _End(128 + signal.SIGINT, keeps_commits=True)
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)  # else a directory that is removed below is missed, and made anew
        if end.is_driverless:
            await in_thread(self._job.place.remove_job)
        await self._close(end.keeps_commits)
        return end.status

    async def _close(self, keeps_commits: bool) -> None:
        await self._preemption.close()
        await self._health.close()
        self._probes.cancel()
        self._socket.close()
        self._stores.close()
        self._allocator.close()
        await self._durable.close()
        await self._standby.close()
        self._backend.close()
        await in_thread(self._copies.close)
        self._storage.close()
        await in_thread(self._commits.close if keeps_commits else self._commits.remove)
        await self._job.driver.close()

    async def _serve_drivers(self) -> _End:
        """Serve until the driver sends Shutdown, refuses this agent, or is away for too long."""
        while True:
            try:
                while not isinstance(message := await self._job.driver.receive(), messages.Shutdown):
                    self._carry_out(message)
                await self._workers.stop_all()
            except ConnectionError as error:  # noqa: PERF203
                self._job.log(f"lost the driver: {error}")
                self._probes.cancel()
                if self._held is not None:  # not after END: the workers may be on their way to its tick
                    self._send(None, messages.Release(self._held))
                end = await self._reconnect()
                if end is not None:
                    return end
            else:
                return _End(0)

    async def _reconnect(self) -> _End | None:
        """Let training continue while the agent reconnects to a driver. Return None when connected.

        An agent without workers waits as well: the next driver may need its retained commits and exit reports.
        """
        timeout_s = self._job.options.driver_timeout_s
        self._set_alone(True)
        try:
            self._job.is_watched = is_watched(await self._job.driver.establish(timeout_s))
        except Refused as refusal:
            self._job.log(f"stopping the workers: {refusal}")
            await self._workers.stop_all()
            return _End(1, keeps_commits=not refusal.is_stopped)
        except ConnectionError as error:
            self._job.log(f"stopping the workers: no driver within --driver-timeout of {timeout_s:g} s ({error})")
            await self._workers.stop_all()
            return _End(1, is_driverless=True)
        await self._workers.all_started()
        self._send_host_report()
        self._preemption.report()
        self._job.outputs.report_again()
        self._set_alone(False)
        self._supervisor.send_stamps()  # the lease is renewed before the driver publishes a new world
        return None

    def _set_alone(self, alone: bool) -> None:
        """Let workers make no commits for which a verdict of the driver would have to come first."""
        for handle in self._job.handles.values():
            handle.liveness.set_alone(alone)

    # --------------------------------------------------------------------------------------- messages of the driver

    def _carry_out(self, message: messages.ToAgent) -> None:
        """Carry out a message of the driver, except JobSpec and Shutdown."""
        match message:
            case messages.StartWorker():
                if message.place is not None:
                    self._stores.use(message.place)
                self._workers.start(message)
            case messages.StopWorker(worker, _, kill):
                self._workers.stop(worker, kill)
            case messages.ToWorkers(workers, body):
                self._send(workers, body)
            case messages.World():
                self._stores.close()
                self._publish(message)
            case messages.BackendOrder(data):
                self._job.begin(self._backend.order(data))
            case messages.ReplicateOrder(commit, targets):
                self._allocator.keep_copies(len(targets))
                self._copies.replicate(commit, _by_slot(targets))
            case messages.StopReplication():
                self._copies.stop_replication()
            case messages.ForgetCopies(before, besides):
                self._copies.forget(before, besides)
            case messages.Acknowledgement(number):
                self._supervisor.renew_lease(number)
            case messages.ProbeOrder():
                self._probes.begin(message)
            case messages.CheckHealth():
                self._health.begin()
            case messages.AskDigests(worker, generation, question):
                if worker in self._job.handles:
                    self._job.handles[worker].liveness.ask(generation, question)
            case messages.CommitsCompared():
                for handle in self._job.handles.values():
                    handle.liveness.judge(message)
            case messages.WatchCalls():
                self._supervisor.calls.watch(message, asyncio.get_running_loop().time())
            case messages.Fetch(slot, offset):
                self._job.begin(self._supply.send_result(slot, offset))
            case messages.SaveDurable() | messages.CompleteDurable():
                self._durable.begin(message)
            case messages.DropDurable(folder):
                self._durable.drop(folder)
            case messages.RunStandby():
                self._standby.begin()
            case messages.FetchOutput(worker):
                self._job.driver.send(self._job.outputs.tail(worker))
            case _:
                self._job.log(f"received an unexpected message from the driver: {type(message).__name__}")

    def _send(self, workers: tuple[WorkerId, ...] | None, body: messages.ToWorkerBody) -> None:
        """Send a message of the driver to these workers; None: to all."""
        match body:
            case messages.Hold(generation):
                self._held = generation
            case messages.Release():
                self._held = None
            case messages.End(generation, at_tick):
                self._held = None
                if at_tick is None:
                    self._ended = max(self._ended, generation)
            case messages.OpenGate(generation):
                self._gate = generation
        data = messages.encode_to_worker(body)
        for worker in list(self._job.handles) if workers is None else workers:
            self._socket.send(worker, data)
            if isinstance(body, messages.Leave):
                self._workers.kill_later(worker)

    def _publish(self, world: messages.World) -> None:
        """Send the members on this host their world."""
        self._workers.exits.clear()
        self._supervisor.world_size = world.size
        for reader, member in enumerate(world.members):
            handle = self._job.handles.get(member.worker)
            if handle is not None:
                handle.joined = world.generation
                handle.audience.rank = member.rank
                handle.lasting.clear()
                handle.awaited.clear()
            own = msgspec.structs.replace(world, reader=reader)
            self._socket.send(member.worker, messages.encode_to_worker(own))

    # --------------------------------------------------------------------------------------- messages of the workers

    def _refusal(self, worker: WorkerId) -> str:
        """Return why a process may not connect as this worker, or ""."""
        return "" if worker in self._job.handles else "is not a worker of this agent"

    def _received(self, worker: WorkerId, message: messages.FromWorkerBody) -> None:
        """Handle a message of a worker. Most of them go to the driver."""
        if isinstance(message, messages.Metrics):
            if worker in self._job.handles:  # a process that the worker has started may outlive it
                self._job.handles[worker].metrics.update(message.values)
            return
        handle, now = self._job.handles[worker], asyncio.get_running_loop().time()
        match message:
            case messages.Hello():
                handle.liveness.begin(now)
                return
            case messages.GrowBuffer(index, size):
                self._job.begin(self._grow_buffer(handle, index, size))
                return
            case messages.CallReport():
                self._supervisor.calls.received(handle, message, now)
                return
            case messages.Synced() | messages.CommitSize() | messages.BackendRequest():
                if isinstance(message, messages.CommitSize):
                    self._allocator.expect(worker.slot, message.bytes, message.to_come)
                self._job.driver.send(messages.BesidesCore(worker, message))
                return
            case messages.RequestStorage():
                return  # not on this connection
            case messages.RunUsed():
                handle.joined = 0  # the place with which it was started does not count any more
                self._stores.close_next()
                self._job.driver.send(messages.WorkerUsesRun(worker))
                return
            case messages.CommitDigests(is_awaited=True):
                handle.keep(message)
            case messages.CommitDigests():
                handle.digests.append(message)  # with the next stamp
                return
            case messages.Attached():
                self._attached = ((worker, message),)
            case messages.First():
                self._allocator.begin_ticks()
            case messages.WorkerPreemptionNotice():
                handle.notice = message
            case _ if isinstance(message, messages.LASTING):
                for digests in handle.digests:
                    self._job.driver.send(messages.FromWorker(worker, digests))
                handle.digests.clear()
                handle.lasting.append((now, message))
        self._job.driver.send(messages.FromWorker(worker, message))

    async def _grow_buffer(self, handle: WorkerHandle, index: int, size_bytes: int) -> None:
        handle.waits += 1
        worker = handle.process.worker
        try:
            length, error = await self._allocator.make(
                worker.slot, min(index, 1), size_bytes, handle.liveness.holds_commit
            )
        finally:
            handle.waits -= 1
        self._socket.send(worker, messages.encode_to_worker(messages.BufferGrown(index, length, error)))

    # ------------------------------------------------------------------------------------------ report of the host

    def _send_host_report(self) -> None:
        """Report what has happened on this host to a driver that was disconnected or has just started.

        It is the first message to a driver that has accepted this agent.
        """
        now = asyncio.get_running_loop().time()
        found = list(self._in_memory())
        self._job.driver.send(
            messages.HostReport(
                commits=tuple((slot, newest) for slot, newest, _ in found),
                workers=tuple(handle.report(now) for handle in self._job.handles.values()),
                exits=tuple(self._workers.exits),
                incarnations=tuple(self._workers.incarnations.items()),
                gate=self._gate,
                ended=self._ended,
                store=self._stores.next_address,
                store_joined=self._stores.joined,
                previous=tuple((slot, previous) for slot, _, previous in found if previous is not None),
                attached=self._attached,
                kept=tuple(self._copies.store.kept()),
                copies_address=self._copies.address,
            )
        )

    def _in_memory(self) -> Iterator[tuple[int, CommitId, CommitId | None]]:
        """Yield slot and commits, whichever worker wrote them: a booting worker may not have found them yet."""
        for slot, files in sorted(self._storage.slots().items()):
            newest, previous = sealed_commits(files.page, self._storage.owner(slot))
            if newest is not None:
                yield slot, newest, previous


def _by_slot(targets: tuple[tuple[SlotId, str, str], ...]) -> Targets:
    """Return the other hosts that are to keep a copy of each slot."""
    found: dict[int, list[Target]] = {}
    for slot_id, host, address in targets:
        others = found.setdefault(slot_id.slot, [])
        if host != slot_id.host:
            others.append(Target(host, address))
    return found


# ------------------------------------------------------------------------------------------- the process of an agent


def serve(launch: Launch, status_socket: str = "") -> NoReturn:
    """Serve until the end, then exit at once: threads may be blocked in a resolver, or by output that nobody reads.

    ``status_socket``: path of a socket that answers ``elasticrun status --agent``. Raises OptionError for a bad one.
    """

    async def run() -> None:
        agent = Agent(launch)
        async with answering(status_socket, lambda: agent.status):
            status = await agent.run()
        await agent.outputs.flushed(BLOCKED_S)
        os._exit(status)

    gc.freeze()  # modules stay for ever: no collection examines them again, so none takes long
    asyncio.run(run())
    raise AssertionError("unreachable")


def join(
    addresses: tuple[str, ...],
    token_file: str,
    name: str,
    slots: int | None,
    *,
    wait_s: float,
    connect_timeout_s: float,
    status_socket: str = "",
    rack: str = "",
) -> NoReturn:
    """Serve a job whose driver did not start this agent (``elasticrun agent --join``), then exit.

    ``addresses``: of drivers, one each. ``slots``: None: as many as this machine has. Raises OptionError.
    """
    try:
        token = read_token(token_file)
    except FileNotFoundError:
        raise OptionError(
            f"--token-file: {token_file!r}: there is no such file. Copy the driver's token file to this machine."
        ) from None
    except (OSError, ValueError) as error:
        raise OptionError(f"--token-file: {token_file!r}: {error}") from None
    launch = Launch(
        host=name,
        agent=secrets.token_hex(8),
        slots=slots_of_this_machine() if slots is None else slots,
        addresses=addresses,
        token=token,
        connect_timeout_s=connect_timeout_s,
        wait_s=wait_s,
        local_address="",
        socket="",
        directory=os.getcwd(),
        job_directory="",
        environment=(),
        rack=rack,
        is_joining=True,
    )
    serve(launch, status_socket)
