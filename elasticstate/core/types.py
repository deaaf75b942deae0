"""The words of the core: identities, worlds, events that go in, effects that come out. All values are frozen.

Every type here is plain data that msgspec can also put on the wire; nothing in this module reads a clock, a socket or
the environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from elasticstate.core.ids import CommitId as CommitId, HostSlots as HostSlots, SlotId as SlotId, WorkerId as WorkerId


class Placement(Struct, frozen=True, gc=False):
    """Where one worker stands in a world. Vocabulary of Horovod and torchrun; see DESIGN.md, section 1."""

    worker: WorkerId
    rank: int
    local_rank: int  # the slot: the device index, sticky for the life of the worker
    local_size: int
    local_leader: bool  # exactly one worker per host and world
    cross_rank: int  # index of the host
    cross_size: int  # number of hosts


@dataclass(frozen=True, slots=True)
class World:
    """The frozen set of (worker -> rank) of one generation. ``members[r].rank == r``."""

    generation: int
    members: tuple[Placement, ...]
    root: int  # rank of the oldest worker among those that hold the newest commit
    lacking: tuple[int, ...]  # ranks that need the root's state, ascending
    store: str  # "address:port" of the TCPStore server of rank 0
    fresh: bool = False  # all members are new processes: none has been in a world before

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
    """The agent of a host is connected and takes orders, and no other one lives there.

    ``commits``: by slot, the newest in its memory. ``workers``: those that have lived on while it was out of touch,
    each with the newest generation that it was given a world of. ``incarnations``: by slot, as it knows.
    """

    host: str
    commits: tuple[tuple[int, CommitId], ...] = ()
    workers: tuple[tuple[WorkerId, int], ...] = ()
    incarnations: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent of a host is gone; its workers are counted as dead.

    ``may_live``: it is only known to be out of reach, and its workers may go on until they miss the driver.
    """

    host: str
    reason: str
    may_live: bool = False


@dataclass(frozen=True, slots=True)
class AgentLeaving:
    """A host has had notice, by a signal to its agent or from the notice command: all its workers drain."""

    host: str
    reason: str


class WorkerReady(Struct, frozen=True, gc=False):
    """READY: the worker stands in ``run``, has left its generation, and its live state equals its commit (I10)."""

    worker: WorkerId
    generation: int  # the generation it was in last; 0: none yet
    commit: CommitId | None  # its newest sealed commit
    previous: CommitId | None  # the other buffer's
    store: str  # "address:port" of its own TCPStore server
    ticks: int = 0  # ticks completed in that generation
    paused_s: float = 0.0  # since the end of its last completed tick


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process has ended. Exactly one of ``exit_code`` and ``signal`` is set."""

    worker: WorkerId
    exit_code: int | None
    signal: int | None
    error: str = ""  # the traceback that the worker wrote down, or the end of its stderr
    time_ns: int = 0  # unix, by its host: when its exception came out, or its end was seen; 0: not known


@dataclass(frozen=True, slots=True)
class WorkerUnresponsive:
    """No liveness stamp for the heartbeat (or hang) time-out. The agent is killing it; WorkerExited follows."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """A worker has had notice, by a signal: it drains."""

    worker: WorkerId
    reason: str


class HoldAnswered(Struct, frozen=True, gc=False):
    """Answer of a worker's sentinel to HOLD(generation): ticks completed, and whether it stands in the exit gate."""

    worker: WorkerId
    generation: int
    ticks: int
    in_gate: bool
    number: int = 0  # of that hold


@dataclass(frozen=True, slots=True)
class FailureReported:
    """An exception came out of ``train`` (or of regroup or sync) in ``generation``.

    ``certain``: the worker has the fact of a broken generation. Otherwise it is a suspect that waits for a verdict.
    """

    worker: WorkerId
    generation: int
    certain: bool
    error: str


@dataclass(frozen=True, slots=True)
class GateEntered:
    """``train`` has returned; the worker stands in the exit gate of ``generation``."""

    worker: WorkerId
    generation: int


class Heartbeat(Struct, frozen=True, gc=False):
    """Proof that the worker lived when the agent heard it last, with where it is and what it has sealed."""

    worker: WorkerId
    place: str  # boot | regroup | train | gate | done
    generation: int
    ticks: int
    commit: CommitId | None


@dataclass(frozen=True, slots=True)
class CommitSealed:
    """The worker has sealed its first commit in a generation: said at once, for there is something to lose now."""

    worker: WorkerId
    commit: CommitId


@dataclass(frozen=True, slots=True)
class FirstTick:
    """The worker has completed the first tick of ``generation``."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing but the clock: send it at ``next_deadline``."""


@dataclass(frozen=True, slots=True)
class Several:
    """Facts that arrived together: all are applied, then one decision is taken."""

    events: tuple[Event, ...]


Event = (
    HostsDiscovered
    | AgentJoined
    | AgentLost
    | AgentLeaving
    | WorkerReady
    | WorkerExited
    | WorkerUnresponsive
    | WorkerLeaving
    | HoldAnswered
    | FailureReported
    | GateEntered
    | Heartbeat
    | CommitSealed
    | FirstTick
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


@dataclass(frozen=True, slots=True)
class StartWorker:
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class StopWorker:
    """SIGTERM, and SIGKILL after the stop time-out; ``kill``: SIGKILL at once."""

    worker: WorkerId
    reason: str
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """HOLD(g) to all members: answer with your ticks, then wait at the end of the next one."""

    generation: int
    number: int = 0  # unlike that of any other hold of the job


@dataclass(frozen=True, slots=True)
class Release:
    """RELEASE(g): the hold is over, nobody is interrupted."""

    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """END(g): at the end of tick ``at_tick`` all save and raise; None: now, all roll back to their last commit."""

    generation: int
    at_tick: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class Sever:
    """The generation that this worker, back in reach, is still in has ended without it."""

    worker: WorkerId
    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class PublishWorld:
    world: World


@dataclass(frozen=True, slots=True)
class Leave:
    """LEAVE: the worker exits with 0; all who stay hold its tick (I15)."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ConfirmOwnError:
    """Verdict OWN for a suspect: its exception is its own; it is recorded and raised. (BROKEN is ``End(now)``.)"""

    worker: WorkerId
    generation: int


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Every member of the world stands in the exit gate: all pass."""

    generation: int


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the event file (DESIGN.md, section 8): name and fields, in the order in which they are printed."""

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
    time_ns: int = 0  # unix, by the clock of the worker's host; 0: not known


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over. Workers and agents that are left are stopped by the driver."""

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
    | ConfirmOwnError
    | OpenGate
    | Note
    | EndJob
)
