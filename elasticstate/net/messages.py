"""The messages of the control plane: typed, validated msgspec structs. Nothing is ever unpickled here.

::

    driver                       agent                        worker's sentinel
      | <- AgentHello  ----------- |                              |
      | -- JobSpec --------------> |                              |
      | <- HostReport ------------ |                              |
      | -- StartWorker ----------> | --- spawn ------------------> |
      |                            | <- Hello ------------------- |
      | <- Ready ----------------- | <- Ready ------------------- |
      | -- WorldMessage ---------> | -- WorldMessage -----------> |   init_process_group, sync, train
      | -- Hold -----------------> | -- Hold -------------------> |
      | <- HoldAnswer ------------ | <- HoldAnswer -------------- |
      | -- End(at tick K) -------> | -- End --------------------> |   all save and raise at tick K
      | <- Ready ----------------- | <- Ready ------------------- |

A worker's message reaches the driver inside :class:`FromWorker`, which names the worker. A message to workers travels
inside :class:`ToWorkers`. A message about a generation names it, and has no effect on any other generation.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.core.types import (
    AskWhere as AskWhere,
    CallReport as CallReport,
    CollectivesReport as CollectivesReport,
    CommitSealed as CommitSealed,
    ConfirmOwnError as ConfirmOwnError,
    CopyFigures,
    DurableSource,
    End as End,
    Hold as Hold,
    Leave as Leave,
    Message as Message,
    OpenGate as OpenGate,
    Placement,
    Release as Release,
    ShardSource,
    StartWorker as StartWorker,
    StopWorker as StopWorker,
    Terminate as Terminate,
    WatchCalls as WatchCalls,
)
from elasticstate.options import Options

# ------------------------------------------------------------------------------------------------------ worker messages
# The messages between worker and agent. messages.py exports these names, too.


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


# ----------------------------------------------------------------------------------------------------- durable messages
# Messages about durable copies, between driver and agents.


class DurablePart(Message, frozen=True):
    """A commit of a slot, of this or another host, that becomes a part of a durable copy."""

    slot: SlotId
    number: int  # of the part, from 1 on
    digest: int  # of its shards; 0: a replicated state


class SaveDurable(Message, frozen=True):
    """Save commits that this host holds as parts of a durable copy. The agent answers with DurableSaved or
    DurableFailed. If these are all parts, the copy is complete then."""

    folder: str  # name of the copy
    parts: tuple[DurablePart, ...]
    total: int  # parts of the copy
    world_size: int
    first: CommitId | None = None  # save the first commit from this one on; None: the newest one of the only part
    earlier: tuple[str, ...] = ()  # the newest copy that this job has saved
    saved: CommitId | None = None  # the commit in that copy: there is nothing to do if it is still the newest


class CompleteDurable(Message, frozen=True):
    """Complete a durable copy whose parts are all saved. The agent answers with DurableSaved or DurableFailed."""

    folder: str
    commit: CommitId
    total: int
    world_size: int
    earlier: tuple[str, ...] = ()


class DropDurable(Message, frozen=True):
    """The durable copy has failed on another host: save no more of it. There is no answer."""

    folder: str


class DurableSaved(Message, frozen=True):
    """The parts of a durable copy on this host are saved, or it is complete. Answer to SaveDurable and
    CompleteDurable."""

    folder: str
    commit: CommitId
    bytes: int
    seconds: float  # since the order arrived
    lost: str = ""  # what is wrong with the newest earlier copy of this job
    warning: str = ""


class DurableFailed(Message, frozen=True):
    """A durable copy could not be saved: another answer to these. ``kind``: see durable/copies.py."""

    folder: str
    kind: str
    reason: str


# ------------------------------------------------------------------------------------------------------------- messages


PROTOCOL_VERSION = 14
STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Signal from an agent to an unresponsive worker: print the stacks of all threads."""
STORE_JOINED = "joined"
"""Line that the process of a store for plain workers writes when a worker has joined the store."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


# ------------------------------------------------------------------------------------------------ agent -> driver


class AgentHello(Message, frozen=True):
    host: str
    agent: str  # unique id of the agent
    slots: int  # 0: the number from discovery
    epoch: int  # of the newest driver that the agent has served; 0: none yet
    pid: int
    protocol: int
    version: str
    rack: str = ""


class FromWorker(Message, frozen=True):
    worker: WorkerId
    body: FromWorkerBody


class Started(Message, frozen=True):
    worker: WorkerId
    pid: int


class Exited(Message, frozen=True):
    worker: WorkerId
    pid: int
    exit_code: int | None
    signal: int | None
    error: str
    time_ns: int = 0  # unix time by the clock of its host: when the exception was raised, or the end was detected
    commits: tuple[CommitId, ...] = ()  # in its slot's buffers, the newest first


class Unresponsive(Message, frozen=True):
    worker: WorkerId
    reason: str


class Stamp(Message, frozen=True):
    """The control page of a living worker."""

    place: Place
    generation: int
    ticks: int
    commit: CommitId | None
    commit_s: float = 0.0  # seconds that the ticks of ``generation`` spent in commits
    pace: tuple[tuple[int, int], ...] = ()  # new points of its own time; see core.types.Heartbeat
    previous: CommitId | None = None  # the commit in the other buffer
    still_s: float = 0.0  # seconds since the worker ended a tick, changed its place, or reported progress
    trained_s: float = 0.0  # seconds since it began to train in ``generation``; 0: it has not


class WorkerReport(Message, frozen=True):
    """State of a worker that was started before this driver, or was unreachable for a while."""

    worker: WorkerId
    pid: int
    generation: int  # of the newest world sent to the worker
    stamp: Stamp
    lasting: tuple[FromWorkerBody, ...]  # messages of that generation that are still valid


class HostReport(Message, frozen=True):
    """First message of an agent that has its JobSpec: all that a new driver needs to know of the host."""

    commits: tuple[tuple[int, CommitId], ...]  # by slot: the newest commit in memory
    workers: tuple[WorkerReport, ...]
    exits: tuple[Exited, ...] = ()  # since the host received its newest world
    incarnations: tuple[tuple[int, int], ...] = ()  # by slot: of the last process
    gate: int = 0  # newest generation whose OpenGate the workers here have received
    ended: int = 0  # newest generation that was ended at once, not at a tick
    store: str = ""  # "address:port" of the store for the next world of plain workers whose rank 0 is on this host
    store_joined: int = 0  # the newest world of plain workers of which a worker has joined a store here
    previous: tuple[tuple[int, CommitId], ...] = ()  # by slot: the commit in the other buffer
    kept: tuple[tuple[SlotId, CommitId], ...] = ()  # copies in the copy store
    copies_address: str = ""  # "address:port" of the copy server
    attached: tuple[tuple[WorkerId, Attached], ...] = ()  # the newest report, also of a dead worker


class Stamps(Message, frozen=True):
    """The latest stamp of each worker of the host with a heartbeat or a change since the last message of this kind.

    ``number``: the driver acknowledges it with ``Acknowledgement``; 0: no acknowledgement. ``copies``: of commits of a
    sharded job, on this host.
    """

    stamps: tuple[tuple[WorkerId, Stamp], ...]
    number: int = 0
    copies: CopyFigures = CopyFigures()


class NextStore(Message, frozen=True):
    """Address of the store for the next world of plain workers. Sent when the last one is in use; "": there is none."""

    address: str


class StoreJoined(Message, frozen=True):
    """A worker of the plain world ``generation`` has joined the store that this host provides."""

    generation: int


class Kept(Message, frozen=True):
    """The copy store of this host has a complete, verified copy of the commit of a slot of this or another host."""

    slot: SlotId
    commit: CommitId


class Dropped(Message, frozen=True):
    """The copy store of ``keeper`` has no such copy: it is damaged, could not be made, or ``keeper`` has refused it."""

    keeper: str
    slot: SlotId
    commit: CommitId
    reason: str


class Damaged(Message, frozen=True):
    """The commit in a buffer of a slot of this host has a wrong checksum."""

    slot: SlotId
    commit: CommitId


class HostPreemptionNotice(Message, frozen=True):
    """The agent's host will be preempted: drain it. ``reason``: source of the notice."""

    reason: str


class AgentWarning(Message, frozen=True):
    """A warning from this host, for the user at the driver."""

    text: str


class OutputTrouble(Message, frozen=True):
    """State of an output of an agent or of the driver: a terminal, an event file, or all log files of a host."""

    output: str  # stdout, stderr, or the option with its value
    reason: str  # why data is not written, or was dropped; empty: the output is written again
    workers: tuple[WorkerId, ...]  # workers that wait until their output is written
    dropped_bytes: int  # since the trouble began


class Fetched(Message, frozen=True):
    """A part of a worker's result: a pickle, which only the caller of ``launch()`` unpickles."""

    slot: int
    offset: int
    data: bytes
    size: int  # of the whole result, in bytes; 0: the worker has returned nothing


class OutputTail(Message, frozen=True):
    """The last lines of a worker's stdout and stderr; empty if the worker has ended."""

    worker: WorkerId
    stdout: str
    stderr: str


class AskStatus(Message, frozen=True):
    """First message of ``elasticrun status``, instead of a Hello. The driver answers with text, then disconnects."""

    as_json: bool = False


Opening = AgentHello | AskStatus
FromAgent = (
    HostReport
    | FromWorker
    | Started
    | Exited
    | Unresponsive
    | Stamps
    | NextStore
    | StoreJoined
    | Kept
    | Dropped
    | Damaged
    | HostPreemptionNotice
    | AgentWarning
    | OutputTrouble
    | Fetched
    | OutputTail
    | DurableSaved
    | DurableFailed
)


# ------------------------------------------------------------------------------------------------ driver -> agent


class JobSpec(Message, frozen=True):
    """First message to an agent: the job with its options."""

    job: str
    job_id: str
    epoch: int  # counts the drivers of the job; agents refuse a lower one
    options: Options  # paths are absolute
    environment: tuple[tuple[str, str], ...]  # variables of all workers
    call: bytes = b""  # the function that workers of ``launch()`` call (see worker/call.py); only they decode it


class Fetch(Message, frozen=True):
    """Request for the result of a slot, from ``offset`` on, after the job is over. The agent answers with Fetched."""

    slot: int
    offset: int


class FetchOutput(Message, frozen=True):
    """Request for the last lines of a worker's output. The agent answers with OutputTail."""

    worker: WorkerId


class ToWorkers(Message, frozen=True):
    """A message to workers. ``workers`` None: all workers of the host; each ignores messages for other generations."""

    workers: tuple[WorkerId, ...] | None
    body: ToWorkerBody


class WorldsOnHost(Message, frozen=True):
    """The part of a world that concerns one host: one WorldMessage for each member there."""

    worlds: tuple[tuple[WorkerId, WorldMessage], ...]


class BackendOrder(Message, frozen=True):
    """Order of the backend's part in the driver to its part in an agent. Only the backend decodes ``data``."""

    data: bytes


class ReplicateOrder(Message, frozen=True):
    """Keep copies of a commit of slots of this host: here, and on other hosts.

    The agent that keeps a copy answers with Kept; an agent that cannot make a copy, or send it, with Dropped. If the
    commit is not sealed yet, the agent waits for it until StopReplicationOrder. If the worker has overwritten it, the
    agent answers with Dropped.
    """

    commit: CommitId
    targets: tuple[tuple[SlotId, str, str], ...]  # slot, host to keep it, and "address:port" of its copy server


class StopReplicationOrder(Message, frozen=True):
    """Cancel the last ReplicateOrder. Copies that exist stay."""


class ForgetCopiesOrder(Message, frozen=True):
    """Remove the kept copies of all commits older than ``before``, except ``besides``.

    From now on, neither send nor accept copies of commits older than ``before``.
    """

    before: CommitId
    besides: CommitId | None = None


class Shutdown(Message, frozen=True):
    """Stop all workers and exit."""

    reason: str


class Acknowledgement(Message, frozen=True):
    """Acknowledgement of the Stamps with this number. It renews the lease on ticks from when the Stamps were sent."""

    number: int


class Refusal(Message, frozen=True):
    """The driver refuses this agent, and closes the connection.

    ``is_stopped``: the driver has stopped the agent before, so its commits are not needed. Otherwise they stay for the
    next agent of the host.
    """

    reason: str
    is_stopped: bool = False


ToAgent = (
    JobSpec
    | StartWorker
    | Fetch
    | FetchOutput
    | SaveDurable
    | CompleteDurable
    | DropDurable
    | StopWorker
    | ToWorkers
    | WorldsOnHost
    | BackendOrder
    | ReplicateOrder
    | StopReplicationOrder
    | ForgetCopiesOrder
    | WatchCalls
    | Shutdown
    | Acknowledgement
    | Refusal
)


# --------------------------------------------------------------------------------------------------------------- launch
# The parameters with which an agent is started.


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that an agent reads from its stdin, as one line of JSON: no list of processes may show the token.

    The pipe stays open for as long as its driver lives.
    """

    host: str
    agent: str  # unique id of the agent
    slots: int  # slots that the agent offers; 0: the number from discovery
    addresses: tuple[str, ...]  # addresses of the driver
    token: str
    connect_timeout_s: float
    wait_s: float  # limit of the first search for a driver
    local_address: str  # address at which other hosts reach this one; empty: that of its connection to the driver
    socket: str  # path of the agent's Unix socket for the workers of this host
    directory: str  # working directory of the workers
    job_directory: str  # removed by the driver, or by the last agent if the driver is lost; empty: use an own one
    environment: tuple[tuple[str, str], ...]  # for the workers; the job's variables override these
    rack: str = ""  # of this host; empty: the one from discovery
    is_joining: bool = False  # started by ``elasticrun agent``, perhaps in a terminal, and not by the driver


# ----------------------------------------------------------------------------------------------------------------- runs
# Ascending numbers as runs, for short messages: in a first world of 10000 members, all but one lack the state.


def as_runs(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending numbers as runs [first, last + 1)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return tuple(runs)


def from_runs(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the numbers of these runs: the reverse of :func:`as_runs`."""
    return tuple(number for first, behind in runs for number in range(first, behind))
