"""Part of the MPI backend in the driver: starts ``mpirun``, and sends the identities that it holds to the agents."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from msgspec import structs

from elasticstate.backends import DriverBackend, DriverServices
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import Message, World
from elasticstate.mpi.broker import BELL, RELAY_PORT, RELEASED, REQUESTS, TOKEN
from elasticstate.mpi.installation import ULFM_OPTIONS, find_mpirun, mpirun_environment, require_mpi
from elasticstate.net import messages
from elasticstate.net.messages import BackendOrder, FromAgent, HostReport, StopWorker, WorkerExited
from elasticstate.net.names import is_this_machine
from elasticstate.processes import ended_child, give_back_descriptors, kill_session, session_members
from elasticstate.threads import in_thread

# The messages between the MPI parts of worker, driver and agent travel in BackendRequest and BackendOrder.


class Applicant(NamedTuple):
    """A worker that requests an MPI identity."""

    host: str
    pid: int
    path: str  # of the file that the worker waits for, on its host


class IdentityRequest(Message, frozen=True):
    """Request of a worker to the driver: identities for these workers, which start MPI together."""

    applicants: tuple[Applicant, ...]


class Identity(Message, frozen=True):
    """Order of the driver to an agent: write this MPI identity to the file ``path``, for which a worker waits."""

    path: str
    environment: tuple[tuple[str, str], ...]
    relay_port: int = 0  # port of the relay to mpirun, on the driver's host; 0: mpirun runs on the same host


decode_request: Callable[[bytes], IdentityRequest] = messages.decoder(IdentityRequest)
decode_order: Callable[[bytes], Identity] = messages.decoder(Identity)


_DIRECTORY = "mpi"
_HELD = "held"  # host/process id of a worker: the file of its holder
_PID_FILE = "pid"
_LOG = "mpirun.log"
_END_TIMEOUT_S = 5.0  # time for killed processes to end
_LOOK_INTERVAL_S = 0.002


class Mpirun:
    """``mpirun`` of one job, which supplies the identities that its workers need (see __init__.py).

    It is started when the first worker requests an identity. It runs on the driver's host only, because it would not
    survive the loss of one of its own daemons. It outlives the driver, as the workers do. If it dies before the
    workers, Open MPI ends them: then they are started again, resume from their commits, and get identities from a new
    ``mpirun``.
    """

    def __init__(self, job_directory: Path, connect_timeout_s: float, is_new_job: bool = False) -> None:
        """Prepare; nothing is started. A new job stops the ``mpirun`` of an earlier job with the same name."""
        self._directory = job_directory / _DIRECTORY
        self._connect_timeout_s = connect_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._bell: int | None = None
        if is_new_job:
            self._discard_earlier_job()

    @property
    def is_used(self) -> bool:
        """Return True if any worker has requested an identity."""
        return self._directory.exists()

    @property
    def pid(self) -> int | None:
        """Process id of ``mpirun`` while it lives, else None."""
        return self._last_pid() if self._lives() else None

    def request_identities(self, applicants: Sequence[Applicant], token: str = "") -> None:
        """Request identities of one MPI job for these workers. Workers on other hosts need the job's token.

        Raises OSError: mpirun cannot be run.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if not self._lives():
            self._start(token)
        # Release identities of an earlier request, for which these workers no longer wait.
        self._release([self._holder_file(host, pid) for host, pid, _ in applicants])
        wanted = []
        for host, pid, _ in applicants:
            path = self._holder_file(host, pid)
            path.parent.mkdir(parents=True, exist_ok=True)
            wanted.append((pid if is_this_machine(host) else 0, str(path)))
        self._send_to_broker({"hold": wanted})

    def identity(self, applicant: Applicant) -> Identity | None:
        """Return the worker's identity; None while it is not held yet."""
        try:
            held = json.loads(self._holder_file(applicant.host, applicant.pid).read_text())
            relay_port = 0 if is_this_machine(applicant.host) else int((self._directory / RELAY_PORT).read_text())
        except FileNotFoundError:  # not held yet, or the relay of a restarted mpirun is not open yet
            return None
        return Identity(applicant.path, tuple(held["environment"].items()), relay_port)

    def last_output(self) -> str:
        """Return the last line of its output, for a report: its log does not outlive the job."""
        lines = (self._directory / _LOG).read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip(" -")), "nothing")

    def end_identity(self, host: str, pid: int) -> None:
        """End the identity of an ended worker: on other hosts MPI cannot detect its end. MPI informs the others."""
        self._release([self._holder_file(host, pid)])

    def end_identities_of(self, host: str) -> None:
        """End the identities of a host whose workers have all ended, or no longer take part."""
        paths = (self._directory / _HELD / host).glob("*")
        self._release([path for path in paths if path.name.isdecimal()], host)  # no half-written file

    def has_ended(self, host: str, pid: int) -> bool:
        """Return True if a worker's identity has ended: MPI has informed the others that the worker is dead."""
        path = self._holder_file(host, pid)
        return path.with_suffix(RELEASED).exists() and not path.exists()

    def _discard_earlier_job(self) -> None:
        pid = self._last_pid()
        if pid is not None and any(str(self._directory) in _command(member) for member in session_members(pid)):
            self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def stop(self) -> None:
        """Stop mpirun with all processes that it has started, at the end of the job."""
        pid = self._last_pid()
        if pid is not None:
            kill_session(pid)
            deadline = time.monotonic() + _END_TIMEOUT_S
            while session_members(pid) and time.monotonic() < deadline:
                time.sleep(_LOOK_INTERVAL_S)
        if self._process is not None:
            self._process.kill()  # also if the file with its number is gone
            self._process.wait()
            self._process = None
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None

    def _release(self, paths: Sequence[Path], host: str | None = None) -> None:
        released = [str(path.rename(path.with_suffix(RELEASED))) for path in paths if path.exists()]
        if released and self._lives():
            self._send_to_broker({"release": released, "host": host})

    def _send_to_broker(self, request: dict[str, object]) -> None:
        path = self._directory / REQUESTS / f"{time.monotonic_ns():020}"  # in order of time, also across drivers
        unnamed = path.with_suffix(".new")
        unnamed.write_text(json.dumps(request))
        unnamed.rename(path)
        if self._bell is None:  # open for reading, too, and kept open: a FIFO that nobody has open loses its data
            self._bell = os.open(self._directory / BELL, os.O_RDWR | os.O_NONBLOCK)
        with suppress(BlockingIOError):  # the FIFO is full, so enough bytes wait
            os.write(self._bell, b"\0")

    def _holder_file(self, host: str, pid: int) -> Path:
        return self._directory / _HELD / host / str(pid)

    def _start(self, token: str) -> None:
        (self._directory / RELAY_PORT).unlink(missing_ok=True)
        if token:
            (self._directory / TOKEN).touch(mode=0o600)
            (self._directory / TOKEN).write_text(token)
        (self._directory / REQUESTS).mkdir(exist_ok=True)
        for request_to_the_last_one in (self._directory / REQUESTS).iterdir():
            request_to_the_last_one.unlink()
        with suppress(FileExistsError):
            os.mkfifo(self._directory / BELL, 0o600)
        options = [*ULFM_OPTIONS, "--oversubscribe", "--bind-to", "none", "-n", "1"]
        broker = [sys.executable, "-m", "elasticstate.mpi.broker", str(self._directory), str(self._connect_timeout_s)]
        with open(self._directory / _LOG, "ab") as log:
            self._process = subprocess.Popen(
                [find_mpirun() or "mpirun", *options, *broker],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=mpirun_environment(str(self._directory)),
                start_new_session=True,
            )
        give_back_descriptors(self._process.pid)
        (self._directory / _PID_FILE).write_text(str(self._process.pid))

    def _lives(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        pid = self._last_pid()
        return pid is not None and pid in session_members(pid)

    def _last_pid(self) -> int | None:
        try:
            return int((self._directory / _PID_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


@dataclass
class _ReturningHost:
    """A host that has reconnected, with workers that are dead for MPI. Its messages wait until these have ended."""

    dead: set[WorkerId]  # and have not ended yet
    host_report: HostReport  # without the dead workers
    exits: list[FromAgent] = field(default_factory=list)  # of the dead workers
    held_back: list[FromAgent] = field(default_factory=list)  # other messages of its agent


class MpiDriver(DriverBackend):
    """Broker of MPI identities: workers request them, ``mpirun`` holds them, and agents receive them."""

    packages: ClassVar[dict[str, str]] = {"mpi4py": "'elasticstate[mpi]'"}

    @staticmethod
    def require_installation(start_timeout_s: float) -> None:
        require_mpi(start_timeout_s)

    @staticmethod
    def worker_variables() -> dict[str, str]:
        return {"MPI4PY_RC_INITIALIZE": "0", "MPI4PY_RC_FINALIZE": "0"}  # importing mpi4py must not start MPI

    def __init__(self, services: DriverServices) -> None:
        self._services = services
        connect_timeout_s = services.options.connect_timeout_s
        self._mpirun = Mpirun(services.directory, connect_timeout_s, services.is_new_job)
        self._watcher: asyncio.Task[None] | None = None
        self._deliveries: set[asyncio.Task[None]] = set()
        self._returning: dict[str, _ReturningHost] = {}
        self._lost: set[str] = set()  # lost hosts whose identities are still held
        self._watch()

    def request(self, data: bytes) -> None:
        """Request identities for workers that start MPI together."""
        applicants = decode_request(data).applicants
        try:
            self._mpirun.request_identities(
                applicants, self._services.token if self._services.has_other_hosts() else ""
            )
        except OSError as error:
            self._services.warn(f"mpirun could not be started: {error}")
            return
        self._watch()
        delivery = asyncio.ensure_future(self._deliver(applicants))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    async def _deliver(self, applicants: Sequence[Applicant]) -> None:
        """Send each worker its identity as soon as ``mpirun`` holds it. ``--start-timeout`` limits the wait."""
        loop = asyncio.get_running_loop()
        limit_s = self._services.options.start_timeout_s
        deadline, waiting = loop.time() + limit_s, list(applicants)
        while waiting and loop.time() < deadline:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            waiting = [applicant for applicant in waiting if not self._delivered(applicant)]
        if waiting:
            names = ", ".join(f"process {pid} of {host}" for host, pid, _ in waiting)
            self._services.warn(
                f"mpirun supplied no identity for {names} within --start-timeout of {limit_s:g} s; its last output: "
                f"{self._mpirun.last_output()}"
            )

    def _delivered(self, applicant: Applicant) -> bool:
        identity = self._mpirun.identity(applicant)
        if identity is not None:
            self._services.send(applicant.host, BackendOrder(messages.encode(identity)))
        return identity is not None

    def _watch(self) -> None:
        pid = self._mpirun.pid
        if pid is not None and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.ensure_future(self._kill_workers_after(pid))

    async def _kill_workers_after(self, mpirun: int) -> None:
        """Wait for the end of ``mpirun``, then kill all workers: without identities they cannot change their world."""
        with suppress(ProcessLookupError):
            await ended_child(mpirun)
        self._services.warn(
            f"mpirun has ended: all workers restart and resume from their commits; its last output: "
            f"{self._mpirun.last_output()}"
        )
        for worker in list(self._services.workers()):
            self._kill(worker, "mpirun has ended")

    def before_world(self, late_workers: Iterable[WorkerId]) -> None:
        """Kill the late workers: MPI cannot form the new world while they live."""
        self._end_lost_identities()
        if self._mpirun.is_used:
            for worker in late_workers:
                self._kill(worker, "it missed --regroup-timeout, and MPI cannot form the next world while it lives")

    def worker_ended(self, host: str, pid: int) -> None:
        """End the identity of a worker that has ended; MPI then informs the others."""
        self._mpirun.end_identity(host, pid)

    def host_lost(self, host: str) -> None:
        """Mark a host as lost. Its identities end later: its workers may still train with other unreachable hosts."""
        self._lost.add(host)
        self._returning.pop(host, None)

    def due_messages(self, host: str, message: FromAgent, world: World | None) -> Sequence[FromAgent]:
        """Return the messages of a reachable host's agent that must be handled now.

        If the host has workers of the newest ``world``, they continue without the lost hosts. If the host itself was
        lost, its workers that are dead for MPI are killed, and its messages are held back until these workers have
        ended.
        """
        self._lost.discard(host)
        if self._lost and world is not None and any(member.worker.host == host for member in world.members):
            self._end_lost_identities()
        if isinstance(message, HostReport):
            self._returning.pop(host, None)  # of another agent there, or of the same one before it reconnected
            if self._begin_return(host, message):
                return ()
        if host not in self._returning:
            return (message,)
        returning = self._returning[host]
        if isinstance(message, WorkerExited) and message.worker in returning.dead:
            returning.dead.discard(message.worker)
            returning.exits.append(message)
        else:
            returning.held_back.append(message)
        if returning.dead:
            return ()
        del self._returning[host]
        return (*returning.exits, returning.host_report, *returning.held_back)

    def _begin_return(self, host: str, host_report: HostReport) -> bool:
        """Kill the workers of the host that are dead for MPI. Return True if there are any."""
        dead = {report.worker for report in host_report.workers if self._mpirun.has_ended(host, report.pid)}
        for worker in dead:
            self._kill(worker, "MPI reported it as dead while its host was unreachable")
        if dead:
            living = tuple(report for report in host_report.workers if report.worker not in dead)
            self._returning[host] = _ReturningHost(dead, structs.replace(host_report, workers=living))
        return bool(dead)

    def _end_lost_identities(self) -> None:
        for host in self._lost:
            self._mpirun.end_identities_of(host)
        self._lost.clear()

    def _kill(self, worker: WorkerId, reason: str) -> None:
        self._services.send(worker.host, StopWorker(worker, reason, kill=True))

    async def stop(self) -> None:
        """Stop ``mpirun``, at the end of the job."""
        for task in (*self._deliveries, *([self._watcher] if self._watcher is not None else [])):
            task.cancel()
        await in_thread(self._mpirun.stop)
