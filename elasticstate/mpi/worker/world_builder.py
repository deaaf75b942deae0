"""WorldBuilder: the communicator of a world, merged from that of the survivors and those of the new members.

Each member has a *base*: the communicator of the last world that all its members have agreed on (new members have
none). A base is used only if all its members that are in this world still have it::

    base ── revoke, shrink ──┐
    new members' own ────────┼── accept/connect, merge ── split by rank ── agree ── is the next base
    ...                      ┘

Shrink and agree are ULFM's (Bland et al., "Post-failure recovery of MPI communication capability", 2013): by design
they complete even if members die during the call. But Open MPI 5.0.11 crashes if it learns of a death in the shrink
itself, so all members confirm that they have come before they shrink. In connect and merge, the calls of the others may
never return after a death. A process that crashes or hangs in these milliseconds is replaced, and the new one resumes
from the commit: the death costs a second worker.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mpi4py import MPI

from elasticstate.errors import CollectiveError
from elasticstate.log import logger
from elasticstate.mpi.driver_part import Applicant
from elasticstate.net.names import interface_of, is_loopback
from elasticstate.options import inherited_environment
from elasticstate.private import open_directory, read_file
from elasticstate.worker.contexts import Rendezvous

# ------------------------------------------------------------------------------------------------------------- identity
# Identity of this process for MPI: a member of a job of the PMIx server in ``mpirun`` (see mpi/__init__.py).
#
# A process that an agent has started becomes a member of that job with the environment of a holder. ``mpirun`` has
# started the holder for this process, and the holder lives as long as the process. The driver reads that environment,
# and the agent writes it to a file.


_FILE_LOOK_INTERVAL_S = 0.002


def take_identity(path: Path, deadline: float, check: Callable[[], None]) -> None:
    """Wait for the identity at ``path``, and apply it to this process. Raises CollectiveError after ``deadline``."""
    while not path.exists():
        check()
        if time.monotonic() > deadline:
            raise CollectiveError(f"mpirun supplied no identity in time: {path} does not exist")
        time.sleep(_FILE_LOOK_INTERVAL_S)
    directory = open_directory(path.parent)  # refuses a directory that another user has put there
    try:
        variables = json.loads(read_file(directory, path.name))
        os.unlink(path.name, dir_fd=directory)
    finally:
        os.close(directory)
    in_memory = {"OMPI_MCA_btl_sm_backing_directory": str(path.parent)}  # removed with the job
    os.environ.update({**variables, **in_memory})


def settings(local_address: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return Open MPI's settings for a host with address ``local_address``, without those that the user has ``given``.

    They exclude libfabric, whose start sleeps for a second, and select ob1, the only layer that detects failures. On
    several hosts, all processes use TCP, because ``mpirun`` takes all of them for processes of its own host.
    """
    wanted = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct" if is_loopback(local_address) else "self,tcp"}
    interface = interface_of(local_address)
    if interface is not None and "OMPI_MCA_btl_tcp_if_exclude" not in given:  # Open MPI accepts only one of the two
        wanted["OMPI_MCA_btl_tcp_if_include"] = interface
    return {name: value for name, value in wanted.items() if name not in given}


def start_mpi(local_address: str) -> MPI.Intracomm:
    """Call MPI_Init with this process's identity, with all others of the same job. Return the world of that job."""
    if not MPI.Is_initialized():
        os.environ.update(settings(local_address, inherited_environment()))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI.COMM_WORLD


_LOOK_INTERVAL_S = 0.0005
_EARLY_TIMEOUT_S = 5.0
_LATEST_MESSAGE_S = 1000.0  # Linux gives up an unreachable connection after 924 s (tcp_retries2, ip-sysctl)
_TAG = 32767  # the highest tag that every MPI supports


@dataclass(frozen=True)
class Base:
    """A communicator that all its members have agreed on."""

    comm: MPI.Intracomm
    name: str  # name of its generation
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """Data that each member of a world sends to the others."""

    worker: str
    base: str | None
    has_identity: bool  # and has started MPI
    host: str
    pid: int
    path: str  # where this member waits for an identity


def exchange_members(at: Rendezvous, mine: Member) -> list[Member]:
    """Send ``mine`` to all members. Return the data of all members, by rank."""
    at.store.set(f"mpi/{at.rank}", json.dumps(vars(mine)))
    keys = [f"mpi/{rank}" for rank in range(at.size)]
    at.store.wait(keys, at.init_timeout)
    return [Member(**json.loads(member)) for member in at.store.multi_get(keys)]


def agree_on_base(at: Rendezvous, members: list[Member], mine: Base | None) -> str | None:
    """Return the name of the base of this world, the same on all ranks; None if there is none.

    The base is that of the lowest rank that has one. This rank checks that no member here was in the base and has lost
    it.
    """
    holder = next((rank for rank, member in enumerate(members) if member.base is not None), None)
    if holder is None:
        return None
    if holder == at.rank:
        assert mine is not None
        lost = any(member.base != mine.name and member.worker in mine.workers for member in members)
        at.store.set("mpi/base", "" if lost else mine.name)
    at.store.wait(["mpi/base"], at.init_timeout)
    return at.store.get("mpi/base").decode() or None


def pieces(members: list[Member], base: str | None) -> list[list[int]]:
    """Return the ranks of a world in groups by origin.

    The first group contains the members of ``base``. The second one contains the new members that start MPI together.
    Each other rank is a group of its own.
    """
    survivors = [rank for rank, member in enumerate(members) if base is not None and member.base == base]
    fresh = [rank for rank, member in enumerate(members) if not member.has_identity]
    rest = [rank for rank in range(len(members)) if rank not in {*survivors, *fresh}]
    return [part for part in (survivors, fresh, *([rank] for rank in rest)) if part]


@dataclass(eq=False)
class WorldBuilder:
    """Builder of the communicators of one process, one world after the other."""

    host: str
    local_address: str
    pid: int
    path: Path  # where this process waits for its identity
    request: Callable[[tuple[Applicant, ...]], None]  # requests identities for workers

    def __post_init__(self) -> None:
        self.base: Base | None = None
        self._retired: deque[tuple[float, MPI.Comm]] = deque()  # with the time until which each is kept
        self.unfinished: list[MPI.Comm] = []  # communicators to revoke if the generation ends during the build
        self._revoked: list[MPI.Comm] = []
        self._revoking = threading.Lock()

    def start_early(self) -> None:
        """Start MPI before the first world, alone. If no identity arrives in time, MPI starts in the first world."""
        path = self.path.with_suffix(".early")
        path.unlink(missing_ok=True)
        self.request((Applicant(self.host, self.pid, str(path)),))
        try:
            take_identity(path, time.monotonic() + _EARLY_TIMEOUT_S, lambda: None)
        except CollectiveError as error:
            logger.warning("MPI starts with the next world, which takes longer: %s", error)
        else:
            start_mpi(self.local_address)

    def build(self, at: Rendezvous) -> MPI.Intracomm:
        """Return the communicator of the world of ``at``, with its ranks. It is the base from now on.

        Raises CollectiveError, MPI.Exception, or the store's errors.
        """
        has_identity, base_name = MPI.Is_initialized(), None if self.base is None else self.base.name
        mine = Member(at.worker, base_name, has_identity, self.host, self.pid, str(self.path))
        self.unfinished = []  # those of a failed world have been revoked
        members = exchange_members(at, mine)
        base = agree_on_base(at, members, self.base)
        if self.base is not None and self.base.name != base:
            self.base = None
        parts = pieces(members, base)
        if not has_identity:
            self._get_identity(at, members)
        self._wait_for_all(at, members, "comes")
        comm = self._own_piece(parts, at.rank, has_identity)
        self._wait_for_all(at, members, "here")
        world = cast(MPI.Intracomm, self._merge(comm, parts, at).Split(0, at.rank))
        self.unfinished.append(world)
        at.check()
        if not world.Agree(1):
            raise CollectiveError("not all members have agreed on the communicator")
        workers = tuple(member.worker for member in members)
        before, self.base = self.base, Base(world, at.name, workers)
        self.retire([*self.unfinished[:-1], *([before.comm] if before is not None else [])])
        self.unfinished = []
        return world

    def revoke(self, comm: MPI.Comm) -> None:
        """Revoke a communicator, unless that is done. From any thread.

        The end of a generation and the next world both revoke its communicator. Open MPI 5.0.11 crashed in the shrink
        of one while another thread revoked it.
        """
        with self._revoking:
            if comm not in self._revoked:
                self._revoked.append(comm)
                comm.Revoke()

    def retire(self, comms: Iterable[MPI.Comm]) -> None:
        """Free these unused communicators, but only after their messages can no longer be in transit to this process:
        they would count as messages of the next communicator, which gets the same number."""
        now = time.monotonic()
        self._retired += [(now + _LATEST_MESSAGE_S, comm) for comm in comms]
        while self._retired and self._retired[0][0] < now:
            comm = self._retired.popleft()[1]
            with self._revoking:  # Open MPI may give the handle to the next communicator
                self._revoked = [other for other in self._revoked if other != comm]
            comm.Free()

    def _get_identity(self, at: Rendezvous, members: list[Member]) -> None:
        fresh = [member for member in members if not member.has_identity]
        if fresh[0].worker == at.worker:
            self.request(tuple(Applicant(member.host, member.pid, member.path) for member in fresh))
        take_identity(self.path, time.monotonic() + at.init_timeout.total_seconds(), at.check)

    def _own_piece(self, parts: list[list[int]], rank: int, has_identity: bool) -> MPI.Intracomm:
        world_of_start = start_mpi(self.local_address)
        if self.base is not None:
            self.revoke(self.base.comm)
            comm = cast(MPI.Intracomm, self.base.comm.Shrink())
        else:
            comm = (MPI.COMM_SELF if has_identity else world_of_start).Dup()
        self.unfinished.append(comm)
        size = next(len(part) for part in parts if rank in part)
        if comm.Get_size() != size:
            raise CollectiveError(f"{comm.Get_size()} instead of {size} processes of the last world have survived")
        return comm

    def _wait_for_all(self, at: Rendezvous, members: list[Member], word: str) -> None:
        """Wait until all members have arrived alive, before a step that a death could disturb."""
        at.check()
        at.store.set(f"mpi/{word}/{at.rank}", "")
        at.store.wait([f"mpi/{word}/{rank}" for rank in range(len(members))], at.init_timeout)
        at.check()

    def _merge(self, comm: MPI.Intracomm, parts: list[list[int]], at: Rendezvous) -> MPI.Intracomm:
        """Connect all pieces, each one to those before it, and return the merged communicator."""
        own = next(index for index, part in enumerate(parts) if at.rank in part)
        for index in range(max(1, own), len(parts)):
            at.check()
            port = f"{at.name}/{index}"  # a key of the PMIx server, known to both sides
            joins = index == own
            between = comm.Connect(port) if joins else comm.Accept(port)
            self.unfinished.append(between)
            comm = between.Merge(joins)
            self.unfinished.append(comm)
        return comm


def group_of(world: MPI.Intracomm, ranks: Sequence[int], has_ended: Callable[[], bool]) -> MPI.Intracomm:
    """Create the communicator of these ranks of a world. All of them call it.

    Open MPI does not return from the creation if a member does not come. So the ranks meet first: each one sends to the
    ranks that are 1, 2, 4 ... places on (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
    1988).

    Raises CollectiveError after the generation has ended.
    """
    own, distance = list(ranks).index(world.Get_rank()), 1
    while distance < len(ranks):
        to, from_ = ranks[(own + distance) % len(ranks)], ranks[(own - distance) % len(ranks)]
        waiting = [world.Isend([b"", MPI.BYTE], to, _TAG), world.Irecv([bytearray(1), MPI.BYTE], from_, _TAG)]
        while not MPI.Request.Testall(waiting):
            if has_ended():
                raise CollectiveError("the generation has ended")
            time.sleep(_LOOK_INTERVAL_S)
        distance *= 2
    return world.Create_group(world.Get_group().Incl(list(ranks)))
