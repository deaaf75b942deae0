"""Types of the core: identifiers, worlds, events (input), effects (output). All are frozen data for msgspec."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from elasticstate.core.calls import CallReport as CallReport, CallReported as CallReported, WatchCalls as WatchCalls
from elasticstate.core.collectives import (
    AskWhere as AskWhere,
    Collective as Collective,
    CollectivesReport as CollectivesReport,
    CollectivesReported as CollectivesReported,
)
from elasticstate.core.copies import (
    CommitDamaged as CommitDamaged,
    CopyDropped as CopyDropped,
    CopyEffect,
    CopyEvent,
    CopyKept as CopyKept,
    CopyOf as CopyOf,
    ForgetCopies as ForgetCopies,
    Replicate as Replicate,
    ShardsAttached as ShardsAttached,
    ShardSource as ShardSource,
    StopReplication as StopReplication,
)
from elasticstate.core.durable import DurableCopySaved as DurableCopySaved, DurableSource as DurableSource
from elasticstate.core.ids import CommitId as CommitId, HostSlots as HostSlots, SlotId as SlotId, WorkerId as WorkerId
from elasticstate.core.message import Message as Message
from elasticstate.core.places import Placement as Placement, PlainPlace as PlainPlace


@dataclass(frozen=True, slots=True)
class World:
    """The world of one generation: a frozen map from worker to rank. ``members[r].rank == r``."""

    generation: int
    members: tuple[Placement, ...]
    root: int  # rank of the oldest worker among those that hold the newest commit
    lacking: tuple[int, ...]  # ranks that need the root's state, ascending
    store: str  # "address:port" of the TCPStore server of rank 0
    fresh: bool = False  # all members are new processes that have not been in a world before
    is_plain: bool = False  # the members do not use ``run``
    near: tuple[int, ...] = ()  # those of ``lacking`` that read a commit of the root, or of their keeper, from memory
    line: CommitId | None = None  # the commit line; None: nothing is attached, or no attach is complete
    sources: tuple[ShardSource, ...] = ()  # the readable copies of the line: a slot's own buffer before kept copies
    durable: DurableSource | None = None  # no member holds a usable commit: all start from the newest durable copy
    keepers: tuple[int, ...] = ()  # ranks that keep commits, ascending: the root and one of each host; (): all ranks

    @property
    def size(self) -> int:
        return len(self.members)


# --------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class HostsDiscovered:
    """A new answer of discovery (only sent when it differs from the last one)."""

    hosts: tuple[HostSlots, ...]


@dataclass(frozen=True, slots=True)
class AgentJoined:
    """The agent of a host is connected and accepts messages, and no other agent lives on the host.

    ``commits``: the newest retained commit of each slot. ``workers``: workers that lived on while the agent was
    unreachable, each with the newest generation whose world it received. ``incarnations``: the last one of each slot.
    ``previous``: the commit in the other buffer of a slot. ``kept``: the copies in the agent's copy store.
    """

    host: str
    commits: tuple[tuple[int, CommitId], ...] = ()
    workers: tuple[tuple[WorkerId, int], ...] = ()
    incarnations: tuple[tuple[int, int], ...] = ()
    previous: tuple[tuple[int, CommitId], ...] = ()
    kept: tuple[tuple[SlotId, CommitId], ...] = ()


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent of a host is gone; its workers count as dead.

    ``may_live``: the agent is only unreachable. Its workers may continue until they detect the loss of the driver.
    """

    host: str
    reason: str
    may_live: bool = False


@dataclass(frozen=True, slots=True)
class HostDraining:
    """A host has a preemption notice, by a signal to its agent or from the notice command: all its workers drain."""

    host: str
    reason: str


class WorkerReady(Struct, frozen=True, gc=False):
    """READY: the worker waits in ``run``, has left its generation, and its live state equals its commit (I10)."""

    worker: WorkerId
    generation: int  # the worker's last generation; 0: none yet
    commit: CommitId | None  # its newest sealed commit
    previous: CommitId | None  # the commit in the other buffer
    store: str  # "address:port" of its own TCPStore server
    ticks: int = 0  # ticks completed in that generation
    paused_s: float = 0.0  # seconds since the end of its last completed tick
    behind: bool = False  # the worker ended ticks without training (torch's Join): others have sealed newer commits
    sealed: CommitId | None = None  # the newest commit ever sealed; newer than ``commit`` if that commit is damaged
    names: int = 0  # digest of its value names, if it can read commits of other workers of its host; 0: it cannot
    commit_s: float = 0.0  # seconds of that generation's ticks that it spent in commits
    has_shards: bool = False  # ``commit`` has attached values, of which each member has its own shards
    trained_s: float = 0.0  # seconds since it began to train in that generation; 0: it has not


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process has ended. Exactly one of ``exit_code`` and ``signal`` is set."""

    worker: WorkerId
    exit_code: int | None
    signal: int | None
    error: str = ""  # the traceback that the worker recorded, or the end of its stderr
    time_ns: int = 0  # unix time of its host: when its exception was raised, or its end was detected; 0: not known
    was_started: bool = True  # False: the process could not be started
    commits: tuple[CommitId, ...] = ()  # in its slot's buffers after its end, the newest first


@dataclass(frozen=True, slots=True)
class WorkerUnresponsive:
    """No liveness stamp for the heartbeat (or hang) time-out. The agent kills the worker; WorkerExited follows."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker has received a preemption notice by a signal: the worker drains."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerUsesRun:
    """A worker has called ``run`` (or ``join``): the command is elastic."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class PlainStoreJoined:
    """A worker has connected to the store of the plain world ``generation``, outside ``run``: the command is plain."""

    generation: int


class HoldAnswered(Struct, frozen=True, gc=False):
    """Answer of a worker's sentinel to HOLD(generation): ticks completed, and True if it is in the exit gate."""

    worker: WorkerId
    generation: int
    ticks: int
    in_gate: bool
    number: int = 0  # the number of the hold


@dataclass(frozen=True, slots=True)
class FailureReported:
    """An exception came out of ``train`` (or of regroup or sync) in ``generation``.

    ``certain``: the worker has proof of a broken generation. Otherwise the worker is a suspect and waits for a verdict.
    """

    worker: WorkerId
    generation: int
    certain: bool
    error: str
    hang: bool = False  # the agent reports it: the worker has made no tick for --hang-timeout


@dataclass(frozen=True, slots=True)
class GateEntered:
    """The worker's ``train`` has returned; the worker is in the exit gate of ``generation``."""

    worker: WorkerId
    generation: int
    commit_s: float = 0.0  # see WorkerReady


class Heartbeat(Struct, frozen=True, gc=False):
    """Proof that the worker lived at the agent's last reading, with its place, its ticks and its newest commit.

    ``pace``: new points (tick, time from the begin of the generation to its end without waits for others, in µs).
    ``previous``: the commit in the other buffer. ``still_s``: seconds, by the agent's clock, since the worker ended a
    tick, changed its place, or reported progress.
    """

    worker: WorkerId
    place: str  # boot | regroup | train | gate | done
    generation: int
    ticks: int
    commit: CommitId | None
    commit_s: float = 0.0  # see WorkerReady
    pace: tuple[tuple[int, int], ...] = ()
    previous: CommitId | None = None
    still_s: float = 0.0
    trained_s: float = 0.0  # see WorkerReady


class CommitSealed(Message, frozen=True):
    """The worker has sealed its first commit in a generation. Sent at once, because this commit must not be lost."""

    worker: WorkerId
    commit: CommitId


@dataclass(frozen=True, slots=True)
class FirstTick:
    """The worker has completed the first tick of ``generation``."""

    worker: WorkerId
    generation: int
    train_s: float = 0.0  # since it began to train
    sync_s: float = 0.0  # from the existence of its process groups until then


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal, or a person at the dashboard, stops the job. ``by``: which."""

    by: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed, and nothing else has happened: send this event at ``next_deadline``."""


@dataclass(frozen=True, slots=True)
class Several:
    """Events that arrived together: the core enters all of them, then takes one decision."""

    events: tuple[Event, ...]


Event = (
    HostsDiscovered
    | AgentJoined
    | AgentLost
    | HostDraining
    | WorkerReady
    | WorkerExited
    | WorkerUnresponsive
    | WorkerDraining
    | WorkerUsesRun
    | PlainStoreJoined
    | HoldAnswered
    | FailureReported
    | GateEntered
    | Heartbeat
    | CommitSealed
    | FirstTick
    | CopyEvent
    | DurableCopySaved
    | CallReported
    | CollectivesReported
    | StopRequested
    | TimePassed
    | Several
)


# -------------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartAgent:
    host: str


@dataclass(frozen=True, slots=True)
class StopAgent:
    """The agent stops its workers (SIGTERM, then SIGKILL) and exits."""

    host: str
    reason: str


class StartWorker(Message, frozen=True):
    worker: WorkerId
    reserve_bytes: int = 0  # size of a commit of the job: storage to reserve while the worker boots
    place: PlainPlace | None = None  # None: the command is known to use ``run``
    fit_bytes: int = 0  # do not start it if its commits of this size do not fit: a world trains, and would end in vain


class StopWorker(Message, frozen=True):
    """Stop the worker: SIGTERM, and SIGKILL after the stop time-out. ``kill``: SIGKILL at once."""

    worker: WorkerId
    reason: str
    kill: bool = False


class Hold(Message, frozen=True):
    """HOLD(g) to all members: each answers with its ticks, then waits at the end of its next tick."""

    generation: int
    number: int = 0  # unique in the job


class Release(Message, frozen=True):
    """RELEASE(g): the hold is over, and no member is interrupted."""

    generation: int


class End(Message, frozen=True):
    """END(g): at the end of tick ``at_tick`` all save and raise; None: now, all roll back to their last commit."""

    generation: int
    at_tick: int | None
    cause: str
    hang: bool = False  # the members report their last collectives


@dataclass(frozen=True, slots=True)
class Sever:
    """Sever a worker that is reachable again from its generation, which has ended without it."""

    worker: WorkerId
    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class PublishWorld:
    world: World


class Leave(Message, frozen=True):
    """LEAVE: the worker exits with 0. The staying workers have the state of its last tick (I15)."""

    worker: WorkerId


class Terminate(Message, frozen=True):
    """TERMINATE(g): the job is being stopped. A script that handles SIGTERM gets this signal, in a world that works,
    and ends in its own time. Any other worker leaves at once."""

    generation: int


class ConfirmOwnError(Message, frozen=True):
    """Verdict OWN for a suspect: the worker records and raises its exception. (The verdict BROKEN is ``End(now)``.)"""

    worker: WorkerId
    generation: int


class OpenGate(Message, frozen=True):
    """Every member of the world is in the exit gate: all members pass."""

    generation: int


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the event file (docs/reference/events.md): the name and the fields in print order."""

    event: str
    fields: tuple[tuple[str, object], ...] = ()

    def get(self, key: str) -> object:
        return dict(self.fields).get(key)


@dataclass(frozen=True, slots=True)
class RootCause:
    """The first failure that ended the job, over all hosts."""

    reason: str  # one line: what ended the job
    worker: WorkerId | None = None
    rank: int | None = None
    generation: int = 0
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""  # traceback or the end of stderr
    time_ns: int = 0  # unix time of the worker's host; 0: not known


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over. The driver stops the remaining workers and agents."""

    succeeded: bool
    root_cause: RootCause | None = None


Effect = (
    StartAgent
    | StopAgent
    | StartWorker
    | StopWorker
    | Hold
    | Release
    | End
    | Sever
    | PublishWorld
    | Leave
    | Terminate
    | ConfirmOwnError
    | OpenGate
    | WatchCalls
    | AskWhere
    | CopyEffect
    | Note
    | EndJob
)
