"""What travels on the control plane: typed, validated msgspec messages. Nothing is ever unpickled here.

::

    driver                       agent                        worker's sentinel
      | <- AgentHello  ----------- |                              |
      | -- JobSpec --------------> |                              |
      | <- Serving --------------- |                              |
      | -- StartWorker ----------> | --- spawn ------------------> |
      |                            | <- Hello ------------------- |
      | <- Ready ----------------- | <- Ready ------------------- |
      | -- WorldMessage ---------> | -- WorldMessage -----------> |   init_process_group, sync, train
      | -- Hold -----------------> | -- Hold -------------------> |
      | <- HoldAnswer ------------ | <- HoldAnswer -------------- |
      | -- End(at tick K) -------> | -- End --------------------> |   all save and raise at tick K
      | <- Ready ----------------- | <- Ready ------------------- |

Messages from a worker reach the driver as :class:`FromWorker`, which names the worker; messages to a worker travel as
:class:`ToWorkers`. What concerns a generation names it, and is without effect on any other.
"""

from __future__ import annotations

import signal

from elasticstate.core.types import CommitId, WorkerId
from elasticstate.net.words import (
    LASTING as LASTING,
    Applicant as Applicant,
    AskIdentities as AskIdentities,
    CommitSize as CommitSize,
    Committed as Committed,
    EndOrder as EndOrder,
    Failure as Failure,
    First as First,
    FromWorkerBody as FromWorkerBody,
    Gate as Gate,
    GateOpen as GateOpen,
    Hello as Hello,
    HoldAnswer as HoldAnswer,
    HoldOrder as HoldOrder,
    LeaveOrder as LeaveOrder,
    Message,
    NeedSpace as NeedSpace,
    Notice as Notice,
    OwnError as OwnError,
    Place as Place,
    Ready as Ready,
    ReleaseOrder as ReleaseOrder,
    Space as Space,
    Synced as Synced,
    ToWorkerBody as ToWorkerBody,
    WorldMessage as WorldMessage,
)

PROTOCOL_VERSION = 2
STACKS_SIGNAL = signal.SIGRTMIN + 9
"""From an agent to a worker that does not respond: print the stacks of all threads."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


# ------------------------------------------------------------------------------------------------ agent -> driver


class AgentHello(Message, frozen=True):
    host: str
    agent: str  # unlike any other agent's
    slots: int  # 0: as discovery says
    epoch: int  # of the newest driver that it has obeyed; 0: none yet
    pid: int
    protocol: int
    version: str


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
    time_ns: int = 0  # unix, by the clock of its host: when its exception came out, or its end was seen


class Unresponsive(Message, frozen=True):
    worker: WorkerId
    reason: str


class Stamp(Message, frozen=True):
    """What the page of a living worker says."""

    place: Place
    generation: int
    ticks: int
    commit: CommitId | None


class WorkerReport(Message, frozen=True):
    """All that matters of a worker that was there before this driver, or while it was out of touch."""

    worker: WorkerId
    pid: int
    generation: int  # the newest that it was given a world of
    stamp: Stamp
    words: tuple[FromWorkerBody, ...]  # said in that generation


class Serving(Message, frozen=True):
    """The agent has its JobSpec and takes orders; all that a driver has to know that was not there before."""

    commits: tuple[tuple[int, CommitId], ...]  # by slot: the newest in its memory
    workers: tuple[WorkerReport, ...]
    exits: tuple[Exited, ...] = ()  # since the newest world that this host was given
    incarnations: tuple[tuple[int, int], ...] = ()  # by slot: the last process that it has had
    gate: int = 0  # the newest generation whose gate the workers here were told is open
    ended: int = 0  # the newest generation that they were told has ended, not at a tick


class Stamps(Message, frozen=True):
    """The latest stamp of each worker of the host that was heard since the last message of this kind.

    ``number``: the driver is asked to say that it has heard this one; 0: it is not.
    """

    stamps: tuple[tuple[WorkerId, Stamp], ...]
    number: int = 0


class AgentNotice(Message, frozen=True):
    """The agent's host is to be left: it drains. ``reason``: who says so."""

    reason: str


class AgentWarning(Message, frozen=True):
    """Something that a person at the driver should know of this host."""

    text: str


class Fetched(Message, frozen=True):
    """A part of what a worker has returned: a pickle, into which nobody looks but the caller of ``launch()``."""

    slot: int
    offset: int
    data: bytes
    size: int  # of the whole, in bytes; 0: it has returned nothing


class AskStatus(Message, frozen=True):
    """From ``elasticrun status``, instead of a hello: the answer is text, and the end of the connection."""


Opening = AgentHello | AskStatus
FromAgent = Serving | FromWorker | Started | Exited | Unresponsive | Stamps | AgentNotice | AgentWarning | Fetched


# ------------------------------------------------------------------------------------------------ driver -> agent


class Preemption(Message, frozen=True):
    """How an agent and its workers take notice that they are to leave."""

    signals: tuple[int, ...]
    command: str | None
    interval_s: float
    timeout_s: float


class Output(Message, frozen=True):
    """Where goes what workers print."""

    tagged: bool = True
    log_dir: str | None = None
    tee: int = 3  # what the terminal gets of it: 1 stdout, 2 stderr
    only_ranks: tuple[tuple[int, int], ...] = ()  # whose output the terminal gets, as ranges; none: all


class JobSpec(Message, frozen=True):
    """First message to an agent: what to run, and the options that concern an agent."""

    job: str
    job_id: str
    epoch: int  # counts the drivers of the job; a lower one is refused
    command: tuple[str, ...]
    commit_dir: str
    heartbeat_timeout_s: float
    hang_timeout_s: float | None
    failure_grace_s: float
    start_timeout_s: float
    stop_timeout_s: float
    driver_timeout_s: float
    lease_s: float | None
    output: Output
    environment: tuple[tuple[str, str], ...]
    preemption: Preemption
    backend: str = "auto"  # how tensors travel between workers
    call: bytes = b""  # what workers of ``launch()`` call, as worker/call.py reads it; nobody on the way looks inside


class Fetch(Message, frozen=True):
    """The job is over: what the function has returned in this slot is asked for, from ``offset`` on: Fetched."""

    slot: int
    offset: int


class Spawn(Message, frozen=True):
    worker: WorkerId
    reserve_bytes: int = 0  # what a commit of the job takes: room to make before the first READY


class Stop(Message, frozen=True):
    worker: WorkerId
    reason: str
    kill: bool


class ToWorkers(Message, frozen=True):
    """``workers`` None: to every worker of the host (each ignores what is not its generation's)."""

    workers: tuple[WorkerId, ...] | None
    body: ToWorkerBody


class WorldsOnHost(Message, frozen=True):
    """The world's part that concerns one host: one WorldMessage for each member there."""

    worlds: tuple[tuple[WorkerId, WorldMessage], ...]


class Identity(Message, frozen=True):
    """Who a worker is for MPI, to be written to ``path``: the worker waits for that file."""

    path: str
    environment: tuple[tuple[str, str], ...]
    relay_port: int = 0  # of the driver's host: there its mpirun can be reached; 0: it is on the same host


class Shutdown(Message, frozen=True):
    """Stop all workers and exit."""

    reason: str


class Heard(Message, frozen=True):
    """Of Stamps with this number: from when they were sent on, the lease on ticks is renewed."""

    number: int


class Refusal(Message, frozen=True):
    """The driver does not want this agent, or cannot speak with it; it ends the connection."""

    reason: str


ToAgent = JobSpec | Spawn | Fetch | Stop | ToWorkers | WorldsOnHost | Identity | Shutdown | Heard | Refusal
