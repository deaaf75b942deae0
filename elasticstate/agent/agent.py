"""The agent of one host: carries out the driver's messages, reports events, and judges whether its workers are alive.

The phases of an agent::

    attach ──JobSpec──► serve ──Shutdown──► stop the workers, exit
                          │ ▲ driver lost; driver reconnected
                          ▼ │
                        orphan ──driver_timeout, or refused──► stop the workers, exit

At its end, an agent removes the commits of its host. A refused agent leaves them to the next agent of the host, because
no other host may have a commit as new. But if the driver had stopped the agent before, the agent removes them.

This module has the phase *attach*, which sets up all parts, and the end. service.py has the other phases.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from elasticstate.agent.deleted_files import watch_files
from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.driver_messages import DriverMessages
from elasticstate.agent.durable_uploads import DurableUploads
from elasticstate.agent.host_copies import open_copies
from elasticstate.agent.host_lock import lock_host
from elasticstate.agent.host_report import HostReporter
from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.job_place import JobPlace
from elasticstate.agent.output import Outputs
from elasticstate.agent.plain_stores import PlainStores
from elasticstate.agent.preemption import PreemptionWatch
from elasticstate.agent.python_command import is_python, reason_against_template, script_directory
from elasticstate.agent.running_tasks import RunningTasks
from elasticstate.agent.search import Stopped, find_driver
from elasticstate.agent.service import Service
from elasticstate.agent.stale_files import clean_regularly
from elasticstate.agent.storage_allocator import StorageAllocator
from elasticstate.agent.supervisor import Supervisor
from elasticstate.agent.supply import Supply
from elasticstate.agent.template import Template
from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.agent.worker_messages import WorkerMessages
from elasticstate.agent.worker_process import environment_of_workers
from elasticstate.agent.worker_starter import WorkerStarter
from elasticstate.agent.workers import Workers
from elasticstate.backends import AgentBackend, AgentServices, agent_part
from elasticstate.commits import CommitDirectory
from elasticstate.copies.service import HostCopies
from elasticstate.core.texts import number_of
from elasticstate.core.types import WorkerId
from elasticstate.errors import OptionError
from elasticstate.net.agent_status import AgentStatus
from elasticstate.net.launch import Launch
from elasticstate.net.link import AgentSocket
from elasticstate.net.messages import AgentWarning, Damaged, Dropped, JobSpec, Kept
from elasticstate.net.names import is_loopback, outward_address
from elasticstate.net.trust import storage_key
from elasticstate.options import Options, agent_variable
from elasticstate.options.kinds import split_address
from elasticstate.threads import in_thread


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
        preemption = PreemptionWatch(driver.send)
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
            lambda slot, commit: driver.send(Kept(slot, commit)),
            lambda keeper, slot, commit, reason: driver.send(Dropped(keeper, slot, commit, reason)),
            lambda slot, commit: driver.send(Damaged(slot, commit)),
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
