"""The messages of the control plane: typed, validated msgspec structs. Nothing is ever unpickled here.

::

    driver                       agent                        worker's sentinel
      | <- AgentHello  ----------- |                              |
      | -- JobSpec --------------> |                              |
      | <- HostReport ------------ |                              |
      | -- StartWorker ----------> | --- spawn ------------------> |
      |                            | <- Hello ------------------- |
      | <- Ready ----------------- | <- Ready ------------------- |
      | -- World ---------------> | --- World -----------------> |   init_process_group, sync, train
      | -- Hold -----------------> | -- Hold -------------------> |
      | <- HoldAnswer ------------ | <- HoldAnswer -------------- |
      | -- End(at tick K) -------> | -- End --------------------> |   all save and raise at tick K
      | <- Ready ----------------- | <- Ready ------------------- |

A worker's report reaches the core inside :class:`FromWorker`, which names the worker, and what an agent reports is an
event of the core: both are defined in core/types.py, and nothing converts them. A message to workers travels
inside :class:`ToWorkers`. A message about a generation names it, and has no effect on any other generation.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.core.register import Ballot, Entry, Version
from elasticstate.core.types import (
    AskDigests as AskDigests,
    AskWhere as AskWhere,
    Attached as Attached,
    CallReport as CallReport,
    CheckHealth as CheckHealth,
    CollectivesReport as CollectivesReport,
    CommitDamaged as CommitDamaged,
    CommitDigests as CommitDigests,
    CommitsCompared as CommitsCompared,
    CommitSealed as CommitSealed,
    ConfirmOwnError as ConfirmOwnError,
    CopyDropped as CopyDropped,
    CopyFigures,
    CopyKept as CopyKept,
    End as End,
    First as First,
    ForgetCopies as ForgetCopies,
    FromAgent as Event,
    FromWorker as FromWorker,
    Gate as Gate,
    GenerationFailure as GenerationFailure,
    HealthChecked as HealthChecked,
    Hold as Hold,
    HoldAnswer as HoldAnswer,
    HostDraining as HostDraining,
    Leave as Leave,
    LinksProbed as LinksProbed,
    Message as Message,
    OpenGate as OpenGate,
    Place as Place,
    Ready as Ready,
    Release as Release,
    Report as Report,
    Stamp as Stamp,
    StartWorker as StartWorker,
    StopReplication as StopReplication,
    StopWorker as StopWorker,
    Terminate as Terminate,
    WatchCalls as WatchCalls,
    WorkerExited as WorkerExited,
    WorkerPreemptionNotice as WorkerPreemptionNotice,
    WorkerUnresponsive as WorkerUnresponsive,
    WorkerUsesRun as WorkerUsesRun,
    World as World,
)
from elasticstate.options import Options

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


class Metrics(Message, frozen=True):
    """The newest values that the script has reported since the last message of this kind, by name.

    As the first message on a connection of its own it has no values, but worker and protocol.
    """

    values: tuple[tuple[str, float], ...]
    worker: WorkerId | None = None
    protocol: int = 0


class BackendRequest(Message, frozen=True):
    """Request of the worker's backend to its part in the driver. Only the backend decodes ``data``."""

    data: bytes


LASTING = Ready | GenerationFailure | Gate
"""Messages that stay valid until the worker receives another world."""
Aside = Synced | CommitSize | BackendRequest
"""Messages for the driver that are no events of the core."""
FromWorkerBody = Hello | RequestStorage | RunUsed | GrowBuffer | Metrics | Aside | Report


# ------------------------------------------------------------------------------------------------ agent -> worker


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
    content: tuple[int, int, int] | None = None  # identity of a kept copy's bytes (replicas.store.Sealed)


ToWorkerBody = (
    World | Hold | Release | End | ConfirmOwnError | OpenGate | Leave | Terminate | AskWhere | BufferGrown | Storage
)


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
    """A durable copy could not be saved: another answer to these. ``kind``: see durable/stored_copies.py."""

    folder: str
    kind: str
    reason: str


PROTOCOL_VERSION = 1
STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Signal from an agent to an unresponsive worker: print the stacks of all threads."""
STORE_JOINED = "joined"
"""Line that the process of a store for plain workers writes when a worker has joined the store."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MOST_METRICS = 64
"""Names of values that the scripts of a job may report."""


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


class BesidesCore(Message, frozen=True):
    """A message of a worker for the driver that is no event of the core."""

    worker: WorkerId
    body: Aside


class Started(Message, frozen=True):
    worker: WorkerId
    pid: int


class WorkerReport(Message, frozen=True):
    """State of a worker that was started before this driver, or was unreachable for a while."""

    worker: WorkerId
    pid: int
    generation: int  # of the newest world sent to the worker
    stamp: Stamp
    lasting: tuple[Report, ...]  # messages of that generation that are still valid


class HostReport(Message, frozen=True):
    """First message of an agent that has its JobSpec: all that a new driver needs to know of the host."""

    commits: tuple[tuple[int, CommitId], ...]  # by slot: the newest commit in memory
    workers: tuple[WorkerReport, ...]
    exits: tuple[WorkerExited, ...] = ()  # since the host received its newest world
    incarnations: tuple[tuple[int, int], ...] = ()  # by slot: of the last process
    gate: int = 0  # newest generation whose OpenGate the workers here have received
    ended: int = 0  # newest generation that was ended at once, not at a tick
    store: str = ""  # "address:port" of the store for the next world of plain workers whose rank 0 is on this host
    store_joined: int = 0  # the newest world of plain workers of which a worker has joined a store here
    previous: tuple[tuple[int, CommitId], ...] = ()  # by slot: the commit in the other buffer
    kept: tuple[tuple[SlotId, CommitId], ...] = ()  # copies in the copy store
    copies_address: str = ""  # "address:port" of the copy server
    attached: tuple[tuple[WorkerId, Attached], ...] = ()  # the newest report, also of a dead worker


class HostUse(NamedTuple):
    """Use of a host's processors, memory and GPUs. Shares: from 0 to 1; None: not known."""

    cpu: float | None  # share of the processors that this host may use
    memory_bytes: int
    memory_total_bytes: int
    gpus: int = 0
    gpu: float | None = None  # share of the time in which a GPU computed; the mean of the GPUs
    gpu_memory_bytes: int = 0  # of all GPUs
    gpu_memory_total_bytes: int = 0


class Stamps(Message, frozen=True):
    """The latest stamp of each worker of the host with a heartbeat or a change since the last message of this kind.

    ``number``: the driver acknowledges it with ``Acknowledgement``; 0: no acknowledgement. ``copies``: of commits of a
    sharded job, on this host. ``metrics``: new values that scripts have reported. ``use``: None: not measured since the
    last message.
    """

    stamps: tuple[tuple[WorkerId, Stamp], ...]
    number: int = 0
    copies: CopyFigures = CopyFigures()
    metrics: tuple[tuple[WorkerId, tuple[tuple[str, float], ...]], ...] = ()
    use: HostUse | None = None


class NextStore(Message, frozen=True):
    """Address of the store for the next world of plain workers. Sent when the last one is in use; "": there is none."""

    address: str


class CouldNotStart(Message, frozen=True):
    """The agent cannot serve this job on its host, and ends."""

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


class Voter(Message, frozen=True):
    """Knowledge of an agent that has lost the driver of its job. Answer to NotLeading, and again after a promise."""

    entry: Entry | None  # that this agent keeps, as an acceptor of the job's record
    age_s: float  # since it has accepted the entry
    silent_s: float  # since it last received anything from the driver
    promised_s: float  # since its newest promise in an election; inf: none


class Promised(Message, frozen=True):
    """This agent accepts nothing of an older ballot any more. Answer to Prepare."""

    ballot: Ballot
    entry: Entry | None


class Accepted(Message, frozen=True):
    """This agent keeps the entry of this version. Answer to Accept."""

    version: Version


class VoteRefused(Message, frozen=True):
    """This agent has promised a newer ballot: another answer to Prepare and Accept."""

    by: Ballot


Vote = Voter | Promised | Accepted | VoteRefused


class StandbyListens(Message, frozen=True):
    """Port of the standby on this host; 0: it has ended, or could not be started."""

    port: int
    reason: str = ""


class StandbysKnown(Message, frozen=True):
    """The agent knows where the next driver may listen. Answer to Standbys."""

    addresses: tuple[str, ...]


class Replaced(Message, frozen=True):
    """First message of a new driver to the one before: it must stop, without any word to the agents."""

    epoch: int
    at: str  # host of the new driver


class AskStatus(Message, frozen=True):
    """First message of ``elasticrun status``, instead of a Hello. The driver answers with text, then disconnects."""

    as_json: bool = False


Opening = AgentHello | AskStatus | Replaced
FromAgent = (
    Event
    | HostReport
    | BesidesCore
    | Started
    | Stamps
    | NextStore
    | AgentWarning
    | CouldNotStart
    | OutputTrouble
    | Fetched
    | OutputTail
    | DurableSaved
    | DurableFailed
    | Vote
    | StandbyListens
    | StandbysKnown
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


class NotLeading(Message, frozen=True):
    """Answer to the AgentHello, instead of JobSpec, of a driver that has to be elected first (driver/election.py)."""


class Prepare(Message, frozen=True):
    """Request for the promise to accept nothing of an older ballot, and for the entry that the agent keeps."""

    ballot: Ballot


class Accept(Message, frozen=True):
    """Request to keep the job's record."""

    entry: Entry


VoteRequest = NotLeading | Prepare | Accept


class Standbys(Message, frozen=True):
    """Addresses at which the next driver may listen. The agent answers with StandbysKnown."""

    addresses: tuple[str, ...]


class RunStandby(Message, frozen=True):
    """Run a standby on this host, unless one runs. The agent answers with StandbyListens."""


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


class BackendOrder(Message, frozen=True):
    """Order of the backend's part in the driver to its part in an agent. Only the backend decodes ``data``."""

    data: bytes


class ReplicateOrder(Message, frozen=True):
    """Keep copies of a commit of slots of this host: here, and on other hosts.

    The agent that keeps a copy answers with CopyKept; an agent that cannot make a copy, or send it, with CopyDropped.
    If the commit is not sealed yet, the agent waits for it until StopReplication. If the worker has overwritten it, the
    agent answers with CopyDropped.
    """

    commit: CommitId
    targets: tuple[tuple[SlotId, str, str], ...]  # slot, host to keep it, and "address:port" of its copy server


class ProbeOrder(Message, frozen=True):
    """Try to open connections to the copy servers of other hosts. The agent answers with LinksProbed."""

    number: int
    targets: tuple[tuple[str, str], ...]  # host, and "address:port" of its copy server
    limit_s: float


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
    | World
    | BackendOrder
    | ReplicateOrder
    | StopReplication
    | ForgetCopies
    | WatchCalls
    | ProbeOrder
    | CheckHealth
    | AskDigests
    | CommitsCompared
    | Shutdown
    | Acknowledgement
    | Refusal
    | VoteRequest
    | Standbys
    | RunStandby
)


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that an agent reads from its stdin, as one line of JSON: no list of processes may show the token.

    The pipe stays open for as long as its driver lives.
    """

    host: str
    agent: str  # unique id of the agent
    slots: int  # slots that the agent offers; 0: the number from discovery
    addresses: tuple[str, ...]  # addresses of the driver; with ``is_joining``, of drivers, one each
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
    stdin: int | None = None  # the agent's descriptor of elasticrun's stdin, for a worker


class StandbyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that a standby reads from its stdin, as one line of JSON. The pipe stays open as long as its agent."""

    job: str
    token: str
    heartbeat_timeout_s: float
    connect_timeout_s: float


# ---------------------------------------------------------------------------------------------------------------- codec
# Conversion between messages and bytes. A message to a worker begins with a head for its sentinel.


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a decoder that raises msgspec.DecodeError on any malformed message.

    msgspec's own decoder raises UnicodeDecodeError for text that is not UTF-8.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def strict(data: bytes) -> Any:
        try:
            return decode(data)
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(str(error)) from None

    return strict


encode = msgspec.msgpack.Encoder().encode
decode_from_worker = decoder(FromWorkerBody)
decode_for_worker = decoder(ToWorkerBody)
decode_opening = decoder(Opening)
decode_from_agent = decoder(FromAgent)
decode_to_agent = decoder(ToAgent)


class MessageKind(IntEnum):
    """The kind of a message, which the sentinel needs before Python reads it (same numbers in native/sentinel.hpp)."""

    OTHER = 0
    WORLD = 1
    HOLD = 2
    RELEASE = 3
    END_NOW = 4
    END_AT = 5
    CONFIRM_OWN_ERROR = 6
    OPEN_GATE = 7
    LEAVE = 8
    TERMINATE = 9
    ASK_WHERE = 10


MESSAGE_HEAD = struct.Struct("<QQQ")
"""Head of each message to a worker: kind, generation, and tick or number of a hold (0 if there is none)."""


def encode_to_worker(message: ToWorkerBody) -> bytes:
    """Encode a message for the worker's socket: a head of fixed size for the sentinel, then MessagePack."""
    kind, generation, tick = MessageKind.OTHER, 0, 0
    match message:
        case World(generation=generation):
            kind = MessageKind.WORLD
        case Hold(generation, tick):
            kind = MessageKind.HOLD
        case Release(generation):
            kind = MessageKind.RELEASE
        case End(generation, None, _):
            kind = MessageKind.END_NOW
        case End(generation, int(tick), _):
            kind = MessageKind.END_AT
        case ConfirmOwnError(_, generation):
            kind = MessageKind.CONFIRM_OWN_ERROR
        case OpenGate(generation):
            kind = MessageKind.OPEN_GATE
        case Leave():
            kind = MessageKind.LEAVE
        case Terminate(generation):
            kind = MessageKind.TERMINATE
        case AskWhere(generation):
            kind = MessageKind.ASK_WHERE
    return MESSAGE_HEAD.pack(kind, generation, tick) + encode(message)


def decode_to_worker(data: bytes) -> ToWorkerBody:
    """Decode the result of :func:`encode_to_worker`. Raises msgspec.DecodeError on a malformed message."""
    message: ToWorkerBody = decode_for_worker(data[MESSAGE_HEAD.size :])
    return message
