"""The communicator of a world: the survivors' shrunk one, and the newcomers', merged.

Each member comes with its *base*, the communicator of the last world that all its members have agreed on (the newcomers
with none). A member's base counts only if all who were in it, and are in this world, still have it::

    base ── revoke, shrink ──┐
    newcomers' own ──────────┼── accept/connect, merge ── split by rank ── agree ── is the next base
    ...                      ┘

Shrink and agree are ULFM's: they end whoever dies meanwhile (Bland et al., "Post-failure recovery of MPI communication
capability", 2013). Connecting and merging does not: if a member dies in those milliseconds, the others may never come
out of the library again; then this process is replaced, and resumes from its commit.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from elasticstate.errors import CollectiveError
from elasticstate.net.messages import Applicant, AskIdentities
from elasticstate.worker.contexts.context import Rendezvous
from elasticstate.worker.contexts.mpi.identity import forget_identity, start_mpi, take_identity
from elasticstate.worker.contexts.mpi.library import MPI

_LOOK_INTERVAL_S = 0.0005
_EARLY_TIMEOUT_S = 5.0
_LATEST_MESSAGE_S = 1000.0  # Linux gives a connection up that is out of reach after 924 s (tcp_retries2, ip-sysctl)
_TAG = 32767  # the highest that every MPI has


@dataclass(frozen=True)
class Base:
    """A communicator that all its members have agreed on."""

    comm: MPI.Intracomm
    name: str  # of its generation
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """What each member of a world tells the others."""

    worker: str
    base: str | None
    is_known: bool  # has an identity, and has started MPI
    host: str
    pid: int
    path: str  # where it waits for an identity


def exchanged(at: Rendezvous, mine: Member) -> list[Member]:
    """What all members tell, by rank."""
    at.store.set(f"mpi/{at.rank}", json.dumps(vars(mine)))
    keys = [f"mpi/{rank}" for rank in range(at.size)]
    at.store.wait(keys, at.init_timeout)
    return [Member(**json.loads(told)) for told in at.store.multi_get(keys)]


def base_that_counts(at: Rendezvous, members: list[Member], mine: Base | None) -> str | None:
    """The name of the base that this world is built on, the same for all; None if there is none.

    It is that of the lowest rank that has one, who looks whether somebody here was in it and has lost it.
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
    """The ranks of a world by what they come from: those of ``base``; the newcomers that start MPI together; and each
    other by itself."""
    survivors = [rank for rank, member in enumerate(members) if base is not None and member.base == base]
    fresh = [rank for rank, member in enumerate(members) if not member.is_known]
    rest = [rank for rank in range(len(members)) if rank not in {*survivors, *fresh}]
    return [part for part in (survivors, fresh, *([rank] for rank in rest)) if part]


class WorldBuilder:
    """Builds the communicators of one process, one world after the other."""

    def __init__(
        self, host: str, local_address: str, pid: int, path: Path, ask: Callable[[AskIdentities], None]
    ) -> None:
        """``path``: where this process waits for its identity. ``ask`` has holders of identities started."""
        self._host = host
        self._local_address = local_address
        self._pid = pid
        self._path = path
        self._ask = ask
        self.base: Base | None = None
        self._passed: deque[tuple[float, MPI.Comm]] = deque()  # until when they are kept
        self.underway: list[MPI.Comm] = []  # what is to be revoked when the generation ends meanwhile

    def start_early(self) -> None:
        """Start MPI before there is a world, alone. Without an identity in time, that is left to the first world."""
        path = self._path.with_suffix(".early")
        forget_identity(path)
        self._ask(AskIdentities((Applicant(self._host, self._pid, str(path)),)))
        try:
            take_identity(path, time.monotonic() + _EARLY_TIMEOUT_S, lambda: None)
        except CollectiveError as error:
            sys.stderr.write(f"elasticstate: MPI starts with the next world: {error}\n")
        else:
            start_mpi(self._local_address)

    def build(self, at: Rendezvous) -> MPI.Intracomm:
        """The communicator of the world of ``at``, with its ranks; it is the base from now on.

        Raises CollectiveError, MPI.Exception, or what the store raises.
        """
        is_known, base_name = MPI.Is_initialized(), None if self.base is None else self.base.name
        mine = Member(at.worker, base_name, is_known, self._host, self._pid, str(self._path))
        self.underway = []  # those of a world that failed have been revoked
        members = exchanged(at, mine)
        base = base_that_counts(at, members, self.base)
        if self.base is not None and self.base.name != base:
            self.base = None
        parts = pieces(members, base)
        if not is_known:
            self._become_known(at, members)
        comm = self._own_piece(parts, at.rank, is_known)
        self._meet(at, members)
        world = cast(MPI.Intracomm, self._merged(comm, parts, at).Split(0, at.rank))
        self.underway.append(world)
        at.check()
        if not world.Agree(1):
            raise CollectiveError("not all members have agreed on the communicator")
        workers = tuple(member.worker for member in members)
        before, self.base = self.base, Base(world, at.name, workers)
        self.put_away([*self.underway[:-1], *([before.comm] if before is not None else [])])
        self.underway = []
        return world

    def put_away(self, comms: Iterable[MPI.Comm]) -> None:
        """These are used no more, and freed when nothing of them can be on its way to this process any more.

        Open MPI gives the number of a communicator that is freed to the next one. What a member that is out of reach
        has sent in the old one would, when it can be reached again, count as sent in the new one: whose own messages
        are lost for it.
        """
        now = time.monotonic()
        self._passed += [(now + _LATEST_MESSAGE_S, comm) for comm in comms]
        while self._passed and self._passed[0][0] < now:
            self._passed.popleft()[1].Free()

    def _become_known(self, at: Rendezvous, members: list[Member]) -> None:
        fresh = [member for member in members if not member.is_known]
        if fresh[0].worker == at.worker:
            self._ask(AskIdentities(tuple(Applicant(member.host, member.pid, member.path) for member in fresh)))
        take_identity(self._path, time.monotonic() + at.init_timeout.total_seconds(), at.check)

    def _own_piece(self, parts: list[list[int]], rank: int, is_known: bool) -> MPI.Intracomm:
        world_of_start = start_mpi(self._local_address)
        if self.base is not None:
            self.base.comm.Revoke()
            comm = cast(MPI.Intracomm, self.base.comm.Shrink())
        else:
            comm = (MPI.COMM_SELF if is_known else world_of_start).Dup()
        self.underway.append(comm)
        size = next(len(part) for part in parts if rank in part)
        if comm.Get_size() != size:
            raise CollectiveError(f"{comm.Get_size()} processes of the last world are there, not {size}")
        return comm

    def _meet(self, at: Rendezvous, members: list[Member]) -> None:
        """All are here, and alive: what follows must not wait for somebody who does not come."""
        at.check()
        at.store.set(f"mpi/here/{at.rank}", "")
        at.store.wait([f"mpi/here/{rank}" for rank in range(len(members))], at.init_timeout)
        at.check()

    def _merged(self, comm: MPI.Intracomm, parts: list[list[int]], at: Rendezvous) -> MPI.Intracomm:
        """All pieces, one after the other connected to those before it."""
        own = next(index for index, part in enumerate(parts) if at.rank in part)
        for index in range(max(1, own), len(parts)):
            at.check()
            port = f"{at.name}/{index}"  # a key of the PMIx server: both sides know it
            joins = index == own
            between = comm.Connect(port) if joins else comm.Accept(port)
            self.underway.append(between)
            comm = between.Merge(joins)
            self.underway.append(comm)
        return comm


def group_of(world: MPI.Intracomm, ranks: Sequence[int], has_ended: Callable[[], bool]) -> MPI.Intracomm:
    """The communicator of these ranks of a world, which all of them make. Raises CollectiveError once it has ended.

    Open MPI does not come back from making one if a member does not come; so they meet before, each telling those that
    are 1, 2, 4 ... places on (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988).
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
