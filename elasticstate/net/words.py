"""What worker and agent say to each other; see messages.py, which has these names too."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec

from elasticstate.core.types import CommitId, Placement, WorkerId


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: an array ``[tag, field, ...]`` in MessagePack."""


class Place(IntEnum):
    """Where a worker is, as its page says (native/sentinel.hpp has the same numbers)."""

    BOOT = 0
    REGROUP = 1
    TRAIN = 2
    GATE = 3
    DONE = 4


# ------------------------------------------------------------------------------------------------ worker -> agent


class Hello(Message, frozen=True):
    """First message on the socket: who I am."""

    worker: WorkerId
    pid: int
    protocol: int


class Ready(Message, frozen=True):
    generation: int
    commit: CommitId | None
    previous: CommitId | None
    store: str
    ticks: int
    paused_s: float


class HoldAnswer(Message, frozen=True):
    generation: int
    ticks: int
    in_gate: bool
    number: int = 0


class Failure(Message, frozen=True):
    generation: int
    certain: bool
    error: str


class Gate(Message, frozen=True):
    generation: int


class First(Message, frozen=True):
    """The first tick of this generation is complete."""

    generation: int


class Synced(Message, frozen=True):
    """What ``sync`` moved into this worker (or out of it, at the root)."""

    generation: int
    bytes: int
    seconds: float


class CommitSize(Message, frozen=True):
    """What a commit of this worker takes; said when it grows."""

    bytes: int


class NeedSpace(Message, frozen=True):
    """Commit buffer ``index`` (0 or 1) of this worker has to take so many bytes: the agent answers with Space."""

    index: int
    bytes: int


class Committed(Message, frozen=True):
    """The first commit of a generation: if all holders die right after it, there was something to lose."""

    commit: CommitId


class Notice(Message, frozen=True):
    """The worker has had this signal, one of ``--preemption-signals``: it drains."""

    signal: int


class Applicant(NamedTuple):
    """A worker that asks for an identity of MPI's (see elasticstate/mpi)."""

    host: str
    pid: int
    path: str  # of the file that it waits for, on its host


class AskIdentities(Message, frozen=True):
    """These workers are to start MPI together."""

    members: tuple[Applicant, ...]


LASTING = Ready | Failure | Gate
"""What stays true of a worker until it is given another world."""
FromWorkerBody = (
    Hello
    | Ready
    | HoldAnswer
    | Failure
    | Gate
    | First
    | Synced
    | CommitSize
    | NeedSpace
    | Committed
    | Notice
    | AskIdentities
)


# ------------------------------------------------------------------------------------------------ agent -> worker


class WorldMessage(Message, frozen=True):
    """A worker's part of a world."""

    job: str
    generation: int
    placement: Placement
    size: int
    root: int
    lacking: tuple[tuple[int, int], ...]  # as runs: of a first world's members all but one lack the state
    store: str
    collective_timeout_s: float
    regroup_timeout_s: float
    verify_sync: bool = False
    fresh: bool = False


class HoldOrder(Message, frozen=True):
    """``number``: unlike that of any other hold, so that an answer to an old one is not taken for this one's."""

    generation: int
    number: int = 0


class ReleaseOrder(Message, frozen=True):
    generation: int


class EndOrder(Message, frozen=True):
    """``at_tick`` None: now."""

    generation: int
    at_tick: int | None
    cause: str


class OwnError(Message, frozen=True):
    """Verdict OWN for the suspect of this generation."""

    generation: int


class GateOpen(Message, frozen=True):
    generation: int


class LeaveOrder(Message, frozen=True):
    """Exit with 0: all who stay hold your tick."""


class Space(Message, frozen=True):
    """Commit buffer ``index`` is a file of ``bytes`` by now; or ``error`` says why it cannot be."""

    index: int
    bytes: int
    error: str


ToWorkerBody = WorldMessage | HoldOrder | ReleaseOrder | EndOrder | OwnError | GateOpen | LeaveOrder | Space
