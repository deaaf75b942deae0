"""Part of the MPI backend in the driver: starts ``mpirun``, and sends the identities that it holds to the agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import structs

from elasticstate.backends import DriverBackend, DriverServices
from elasticstate.core.types import WorkerId, World
from elasticstate.mpi.installation import require_mpi
from elasticstate.mpi.messages import Applicant, as_order, decode_request
from elasticstate.mpi.mpirun import Mpirun
from elasticstate.net.messages import Exited, FromAgent, HostReport, StopWorker
from elasticstate.processes import ended_child
from elasticstate.threads import in_thread

_LOOK_INTERVAL_S = 0.002


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
            self._services.send(applicant.host, as_order(identity))
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
        if isinstance(message, Exited) and message.worker in returning.dead:
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
