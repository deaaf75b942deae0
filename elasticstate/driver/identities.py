"""MPI identities of the workers: ``mpirun`` holds them, and the driver sends them to the agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import structs

from elasticstate.core.types import WorkerId, World
from elasticstate.driver.agents import Agents
from elasticstate.driver.mpirun import Mpirun
from elasticstate.net.messages import Applicant, Exited, FromAgent, HostReport, StopWorker
from elasticstate.processes import ended_child
from elasticstate.threads import in_thread

_LOOK_INTERVAL_S = 0.002


@dataclass
class _Coming:
    """A host that has reconnected, with workers that are dead for MPI."""

    dead: set[WorkerId]  # and have not ended yet
    host_report: HostReport  # without the dead workers
    ends: list[FromAgent] = field(default_factory=list)
    later: list[FromAgent] = field(default_factory=list)  # messages of its agent since then


class IdentityBroker:
    """Broker of MPI identities, for a job with ``--backend mpi``. With other backends no worker asks for one."""

    def __init__(
        self,
        mpirun: Mpirun,
        agents: Agents,
        token: str,
        timeout_s: float,
        workers: Callable[[], Iterable[WorkerId]],
        warn: Callable[[str], None],
    ) -> None:
        """``timeout_s``: limit until all identities of a request are held. ``workers``: returns all current workers."""
        self._mpirun = mpirun
        self._agents = agents
        self._token = token
        self._timeout_s = timeout_s
        self._workers = workers
        self._warn = warn
        self._watcher: asyncio.Task[None] | None = None
        self._deliveries: set[asyncio.Task[None]] = set()
        self._coming: dict[str, _Coming] = {}
        self._lost: set[str] = set()  # lost hosts whose identities are still held
        self._watch()

    def ask(self, members: Sequence[Applicant]) -> None:
        """Request identities for these workers, which start MPI together."""
        try:
            self._mpirun.ask(members, self._token if self._agents.is_open else "")
        except OSError as error:
            self._warn(f"mpirun cannot be run: {error}")
            return
        self._watch()
        delivery = asyncio.ensure_future(self._deliver(members))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    async def _deliver(self, members: Sequence[Applicant]) -> None:
        """Send each worker its identity as soon as it is held."""
        loop = asyncio.get_running_loop()
        deadline, waiting = loop.time() + self._timeout_s, list(members)
        while waiting and loop.time() < deadline:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            waiting = [member for member in waiting if not self._delivered(member)]
        if waiting:
            names = ", ".join(f"process {pid} of {host}" for host, pid, _ in waiting)
            self._warn(
                f"mpirun holds no identity for {names} within --start-timeout of {self._timeout_s:g} s; it has said: "
                f"{self._mpirun.last_output()}"
            )

    def _delivered(self, member: Applicant) -> bool:
        identity = self._mpirun.identity(member)
        if identity is not None:
            self._agents.send(member.host, identity)
        return identity is not None

    def _watch(self) -> None:
        pid = self._mpirun.pid
        if pid is not None and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.ensure_future(self._until_it_ends(pid))

    async def _until_it_ends(self, pid: int) -> None:
        """Wait for the end of ``mpirun``, then kill all workers: without identities they cannot change their world."""
        with suppress(ProcessLookupError):
            await ended_child(pid)
        self._warn(
            f"mpirun has ended: all workers resume from their commits; it has said: {self._mpirun.last_output()}"
        )
        for worker in list(self._workers()):
            self._agents.send(worker.host, StopWorker(worker, "mpirun has ended", kill=True))

    def dismiss(self, late: Iterable[WorkerId]) -> None:
        """Kill workers that have not left their last world although a new one exists.

        MPI cannot form the new world while they live.
        """
        self._give_up_the_lost()
        if self._mpirun.is_used:
            for worker in late:
                reason = "it was late by --regroup-timeout, and for MPI it cannot come later"
                self._agents.send(worker.host, StopWorker(worker, reason, kill=True))

    def worker_ended(self, host: str, pid: int) -> None:
        """End the identity of a worker that has ended; MPI then informs the others."""
        self._mpirun.ended(host, pid)

    def host_lost(self, host: str) -> None:
        """Mark a host as lost. Its identities end later, when its workers cannot go on with other unreachable hosts."""
        self._lost.add(host)
        self._coming.pop(host, None)

    def heard(self, host: str, message: FromAgent, world: World | None) -> list[FromAgent]:
        """Return the messages of a reachable host's agent that must be handled now.

        If the host has workers of the newest ``world``, they continue without the lost hosts. If the host itself was
        lost, its workers that are dead for MPI are killed, and its messages are kept back until these workers have
        ended.
        """
        self._lost.discard(host)
        if self._lost and world is not None and any(member.worker.host == host for member in world.members):
            self._give_up_the_lost()
        if isinstance(message, HostReport):
            self._coming.pop(host, None)  # of another agent there, or of the same one before it reconnected
            if self._begin_return(host, message):
                return []
        if host not in self._coming:
            return [message]
        coming = self._coming[host]
        if isinstance(message, Exited) and message.worker in coming.dead:
            coming.dead.discard(message.worker)
            coming.ends.append(message)
        else:
            coming.later.append(message)
        if coming.dead:
            return []
        del self._coming[host]
        return [*coming.ends, coming.host_report, *coming.later]

    def _begin_return(self, host: str, host_report: HostReport) -> bool:
        """Return True if some workers must end first, and kill them."""
        dead = {report.worker for report in host_report.workers if self._mpirun.has_ended(host, report.pid)}
        for worker in dead:
            self._agents.send(host, StopWorker(worker, "MPI has lost it while its host was out of touch", kill=True))
        if dead:
            living = tuple(report for report in host_report.workers if report.worker not in dead)
            self._coming[host] = _Coming(dead, structs.replace(host_report, workers=living))
        return bool(dead)

    def _give_up_the_lost(self) -> None:
        for host in self._lost:
            self._mpirun.lost(host)
        self._lost.clear()

    async def stop(self) -> None:
        """Stop ``mpirun``, at the end of the job."""
        for task in (*self._deliveries, *([self._watcher] if self._watcher is not None else [])):
            task.cancel()
        await in_thread(self._mpirun.stop)
