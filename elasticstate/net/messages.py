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

from elasticstate.core.copies import CopyFigures
from elasticstate.core.types import (
    CommitId,
    SlotId,
    StartWorker as StartWorker,
    StopWorker as StopWorker,
    WatchCalls as WatchCalls,
    WorkerId,
)
from elasticstate.net.durable_messages import (
    CompleteDurable as CompleteDurable,
    DropDurable as DropDurable,
    DurableFailed as DurableFailed,
    DurablePart as DurablePart,
    DurableSaved as DurableSaved,
    SaveDurable as SaveDurable,
)
from elasticstate.net.worker_messages import (
    LASTING as LASTING,
    AskWhere as AskWhere,
    Attached as Attached,
    BackendRequest as BackendRequest,
    BufferGrown as BufferGrown,
    CallReport as CallReport,
    CollectivesReport as CollectivesReport,
    CommitSealed as CommitSealed,
    CommitSize as CommitSize,
    ConfirmOwnError as ConfirmOwnError,
    End as End,
    First as First,
    FromWorkerBody as FromWorkerBody,
    Gate as Gate,
    GenerationFailure as GenerationFailure,
    GrowBuffer as GrowBuffer,
    Hello as Hello,
    Hold as Hold,
    HoldAnswer as HoldAnswer,
    Leave as Leave,
    Message,
    OpenGate as OpenGate,
    Place as Place,
    Ready as Ready,
    Release as Release,
    RequestStorage as RequestStorage,
    RunUsed as RunUsed,
    Storage as Storage,
    Synced as Synced,
    Terminate as Terminate,
    ToWorkerBody as ToWorkerBody,
    WorkerPreemptionNotice as WorkerPreemptionNotice,
    WorldMessage as WorldMessage,
)
from elasticstate.options import Options

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
