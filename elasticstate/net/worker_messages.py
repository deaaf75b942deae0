"""The messages between worker and agent. messages.py exports these names, too."""

from __future__ import annotations

from enum import IntEnum

from elasticstate.core.collectives import AskWhere as AskWhere, CollectivesReport as CollectivesReport
from elasticstate.core.types import (
    CallReport as CallReport,
    CommitId,
    CommitSealed as CommitSealed,
    ConfirmOwnError as ConfirmOwnError,
    DurableSource,
    End as End,
    Hold as Hold,
    Leave as Leave,
    Message as Message,
    OpenGate as OpenGate,
    Placement,
    Release as Release,
    ShardSource,
    SlotId,
    Terminate as Terminate,
    WorkerId,
)


class Place(IntEnum):
    """Phase of a worker, as on its control page (same numbers in native/sentinel.hpp)."""

    BOOT = 0
    REGROUP = 1
    TRAIN = 2
    GATE = 3
    DONE = 4


# ------------------------------------------------------------------------------------------------ worker -> agent


class Hello(Message, frozen=True):
    """First message on the socket: identity of the worker."""

    worker: WorkerId
    pid: int
    protocol: int


class RequestStorage(Message, frozen=True):
    """First message on a worker's second connection. The agent answers with Storage and the descriptors of its files.

    The worker sends it again when the files have lost their names, and for the commits of another slot of its host, or
    a copy that its host keeps.
    """

    worker: WorkerId
    protocol: int
    peer: int | None = None  # slot whose commits the worker wants to read; -1: any; None: the worker's own files
    copy: tuple[SlotId, CommitId] | None = None  # kept copy that the worker wants to read


class RunUsed(Message, frozen=True):
    """Only message on a connection of its own: the script uses ``run``, so its worker is not a plain one."""

    worker: WorkerId
    protocol: int


class Ready(Message, frozen=True):
    generation: int
    commit: CommitId | None
    previous: CommitId | None
    store: str
    ticks: int
    paused_s: float
    behind: bool = False  # the worker ended ticks without training (torch's Join), and others have newer commits
    sealed: CommitId | None = None  # newest commit ever sealed: newer than ``commit`` if that one was damaged
    names: int = 0  # digest of the value names; 0: the worker cannot read commits of other workers of its host
    commit_s: float = 0.0  # seconds that the ticks of ``generation`` spent in commits
    has_shards: bool = False  # ``commit`` has attached values, of which each member has its own shards
    trained_s: float = 0.0  # seconds since it began to train in ``generation``; 0: it has not


class HoldAnswer(Message, frozen=True):
    generation: int
    ticks: int
    in_gate: bool
    number: int = 0


class GenerationFailure(Message, frozen=True):
    generation: int
    certain: bool
    error: str
    hang: bool = False  # the agent reports it, because the worker makes no ticks


class Gate(Message, frozen=True):
    generation: int
    commit_s: float = 0.0  # see Ready


class First(Message, frozen=True):
    """The first tick of this generation is complete."""

    generation: int
    train_s: float = 0.0  # seconds since the worker began to train
    sync_s: float = 0.0  # seconds from the existence of its process groups until then


class Attached(Message, frozen=True):
    """All workers of the world have attached their shards and sealed them as ``(generation, 0)``.

    ``digests``: of the shards of each worker, by rank.
    """

    generation: int
    digests: tuple[int, ...]


class Synced(Message, frozen=True):
    """Amount of data that ``sync`` moved into this worker (or out of it, on the root), and the time."""

    generation: int
    bytes: int
    seconds: float


class CommitSize(Message, frozen=True):
    """Size of a commit of this worker in the present world; sent when it grows.

    ``to_come``: bytes that the first steps of its optimizers will add; None: not known.
    """

    bytes: int
    to_come: int | None = 0


class GrowBuffer(Message, frozen=True):
    """Request to make commit buffer ``index`` (0 or 1) this large. The agent answers with BufferGrown."""

    index: int
    bytes: int


class WorkerPreemptionNotice(Message, frozen=True):
    """The worker has received one of ``--preemption-signals``: drain it."""

    signal: int


class BackendRequest(Message, frozen=True):
    """Request of the worker's backend to its part in the driver. Only the backend decodes ``data``."""

    data: bytes


LASTING = Ready | GenerationFailure | Gate
"""Messages that stay valid until the worker receives another world."""
FromWorkerBody = (
    Hello
    | RequestStorage
    | RunUsed
    | Ready
    | HoldAnswer
    | GenerationFailure
    | Gate
    | First
    | Attached
    | Synced
    | CommitSize
    | GrowBuffer
    | CommitSealed
    | CallReport
    | CollectivesReport
    | WorkerPreemptionNotice
    | BackendRequest
)


# ------------------------------------------------------------------------------------------------ agent -> worker


class WorldMessage(Message, frozen=True):
    """A worker's part of a world."""

    job: str
    generation: int
    placement: Placement
    size: int
    root: int
    lacking: tuple[tuple[int, int], ...]  # ranks that lack the state, as runs: in a first world all but one do
    store: str
    collective_timeout_s: float
    regroup_timeout_s: float
    verify_sync: bool
    fresh: bool = False
    near: tuple[tuple[int, int], ...] = ()  # those of ``lacking`` that read the root's commit from memory, as runs
    root_slot: int = 0
    records_ticks: bool = False
    line: CommitId | None = None  # the commit from which a sharded job starts
    sources: tuple[tuple[ShardSource, str], ...] = ()  # its copies, each with the address of its host's copy server
    durable: DurableSource | None = None
    one_copy: bool = False  # with --one-copy-per-host
    follows: int | None = None  # slot of the keeper whose commits this worker restores; None: it keeps its own
    local_place: int = 0  # place among the workers of its host, without gaps


class BufferGrown(Message, frozen=True):
    """Size of the file of commit buffer ``index``, or ``error``: why it cannot be so large."""

    index: int
    bytes: int
    error: str


class Storage(Message, frozen=True):
    """Key of the job's storage. It comes with descriptors of the slot's page, both buffers and result file.

    For another slot (``peer``) it comes with those of page and buffers, or with none if the slot has no files. For a
    kept copy (``copy``) it comes with that of the file, or with none if this host keeps no such copy. With
    ``has_call`` the last descriptor is of the call. ``key`` authenticates what the job has written itself. It is
    never on disk, nor in an environment variable.
    """

    key: bytes
    has_call: bool
    slot: int = -1  # of the files, if another slot was requested
    content: tuple[int, int, int] | None = None  # identity of a kept copy's bytes (copies.sealed.Sealed)


ToWorkerBody = (
    WorldMessage
    | Hold
    | Release
    | End
    | ConfirmOwnError
    | OpenGate
    | Leave
    | Terminate
    | AskWhere
    | BufferGrown
    | Storage
)
