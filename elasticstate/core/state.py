"""State of the core: hosts, slots, workers, the phase, the ledger of the job. Frozen; a step works on a Draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, ParamSpec

from msgspec import Struct
from msgspec.structs import replace

from elasticstate.core import types as t
from elasticstate.core.event_file import CommonFields, Waiting as WaitingNote, Warning, WorkerFields, name_of
from elasticstate.core.figures import Losses, Origin, TimeAccount
from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.core.policy import Policy

NEWCOMER = 1 << 62
"""Age of a worker that was not in the last world: younger than every survivor."""

# --------------------------------------------------------------------------------------------------------------- phases
# The phases of a job, and why a generation has ended. Frozen values.
#
# The phases and their transitions (one ``become_`` function per entry)::
#
#     Waiting ──────────► Running ◄───────┐        ┌─► Over
#        ▲                 │  │           │        │
#        │     END(K), END │  │ all in    │        │  from every phase
#        │                 ▼  │ the gate  │        │
#        └───────────── Forming ──────────┘        │
#                             │                    │
#                             └──► Finishing ──────┘
#
# A signal to stop the job changes Running to Stopping, a kind of Finishing, and every other phase to Over.
#
# A world of plain workers (which do not use ``run``) has one phase, Together, between Waiting and Waiting or Over.


FailureKind = Literal["own", "lost", "link", "reported", "drain", "divergence"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Unplanned end of a generation. ``kind`` own: a worker ended by itself on a living host; link: two hosts cannot
    reach each other; reported: a worker reported the generation as broken, and no cause is known (yet)."""

    cause: t.RootCause
    kind: FailureKind
    own_error: bool = False  # an exit with a code other than 0, without a signal; of plain workers also a crash
    hang: bool = False  # no tick for --hang-timeout


@dataclass(frozen=True, slots=True)
class Waiting:
    """Phase in which too few workers are READY, or a slot without a READY worker retains the newest commit. In: at the
    start, and when an ended generation leaves too few workers. Out: a world, or the end."""

    since: float
    noticed: bool = False
    retained_since: float | None = None  # enough workers are READY, but the newest commit is awaited


@dataclass(frozen=True, slots=True)
class Forming:
    """Phase after the end of generation ``ended``: its living members are awaited. Out: all are READY, or time-out."""

    since: float
    ended: int
    at_tick: int | None  # None: now
    cause: str
    failure: Failure | None  # None: planned
    clock: float | None  # the regroup time-out counts from here; None: no member has reached the tick yet
    drains: bool = False  # the generation ends because members drain
    noticed: bool = False


@dataclass(frozen=True, slots=True)
class Stall:
    """A call in which some ranks have waited for --stall-check-time for ranks that have not made the call."""

    call: tuple[int, int]  # process set, number
    text: str
    since: float  # when the first rank began to wait


@dataclass(frozen=True, slots=True)
class Straggler:
    """A member that is persistently slower than the others."""

    worker: WorkerId
    rank: int
    since: float  # when it was named
    factor: float  # its own time, divided by the median of the others'

    def text(self) -> str:
        return f"{self.worker} (rank {self.rank}): {self.factor:.2f} times the own time of the others"


@dataclass(frozen=True, slots=True)
class Running:
    """Phase with a published world. Out: END at a tick or now, or all members are in the exit gate."""

    since: float
    earlier_ticks: int = 0  # of this world, before ``since``: with another driver
    first_tick: bool = False
    hold_since: float | None = None
    hold_cause: str = ""
    gate_since: float | None = None  # when the first member entered
    noticed: tuple[str, ...] = ()
    has_calls: bool = False  # some member has reported a collective call
    watched_since: float | None = None  # when the reports of all calls were requested
    stalls: tuple[Stall, ...] = ()  # that were reported
    has_pace: bool = False  # some member has reported its own time
    paced: int = 0  # the newest tick whose own times were compared
    stragglers: tuple[Straggler, ...] = ()  # that were named and have not recovered


@dataclass(frozen=True, slots=True)
class Finishing:
    """Phase with an open exit gate: the members exit in their own time. Out: they and all other workers have exited."""

    since: float
    failure: Failure | None = None
    noticed: bool = False


@dataclass(frozen=True, slots=True)
class Stopping(Finishing):
    """Phase of a world that is being stopped: nothing starts, and its members end in their own time, as scripts do that
    handle SIGTERM. Out: all have exited, or --stop-timeout."""

    reason: str = ""
    is_open: bool = False  # the exit gate


@dataclass(frozen=True, slots=True)
class Over:
    """Final phase, FINISHED or FAILED. No event has an effect any more."""

    succeeded: bool
    ended_at: float


@dataclass(frozen=True, slots=True)
class Together:
    """Phase with a world of plain workers. Out: a member fails, members change, or all have exited with 0."""

    since: float


Phase = Waiting | Forming | Running | Finishing | Together | Over


class Round(Struct, frozen=True, gc=False):
    """Workers that were started together, with their places in a world of plain workers.

    A round lasts until all of its workers have ended. If the command turns out to use ``run``, there is no round.
    """

    members: tuple[t.Placement, ...]
    since: float
    failure: Failure | None = None  # the first failure of a member
    ends_at: float = inf  # after the failure, other workers may fail in the same way until this time
    end: str = ""  # why its workers are stopped
    exits_since: float = inf  # since a first worker has exited with 0
    noticed: bool = False  # who has not exited was reported


class Standstill(Struct, frozen=True, gc=False):
    """A time in which no member completes a tick, and that is far longer than a usual tick."""

    since: float  # when the last member moved: ended a tick, began to train, or reported progress
    ticks: int  # completed before it
    asked_at: float  # when the members were asked where they are
    reports: Mapping[int, t.CollectivesReport] = {}  # by rank, until the report is complete
    text: str = ""  # where the members are; "": not reported yet


class Ticking(Struct, frozen=True, gc=False):
    """Ticks of the present world, as far as reported."""

    completed: int = 0  # the most of any member
    at: float = -inf  # when ``completed`` was first reported; before that, when the world began
    times: tuple[float, ...] = ()  # mean times of the last ticks between two reports, over all worlds
    standstill: Standstill | None = None


Link = tuple[str, str]
"""Host and peer. Cut: the host gets no answer from the peer."""


class Links(Struct, frozen=True, gc=False):
    """Links between hosts: the last order to probe them, and those that are cut (links.py)."""

    cut: Mapping[Link, float] = {}  # the time since which a link is known to be cut
    apart: Mapping[str, float] = {}  # hosts without which the world was formed: they join no world that trains until
    number: int = 0  # of the last order
    asked: Mapping[str, tuple[str, ...]] = {}  # by host: the peers of its order, until it has answered
    unanswered: tuple[Link, ...] = ()  # that count as cut when the peer answers its order
    asked_at: float = -inf
    all_asked_at: float = -inf  # the last order for all links of a world


class ValueSearch(Struct, frozen=True, gc=False):
    """Search of the first value that differs between the commits of two workers (divergence.py)."""

    workers: tuple[WorkerId, WorkerId]
    start: int  # the tick after which the commits may differ
    tick: int  # at which they differ
    question: t.DigestQuestion = t.DigestQuestion()
    answers: Mapping[WorkerId, t.DigestAnswer] = {}


class Digests(Struct, frozen=True, gc=False):
    """Digests of the commits of one generation (divergence.py)."""

    generation: int = 0
    known: Mapping[tuple[int, int], int] = {}  # the first that was reported, by begin and tick
    differs: tuple[int, int] | None = None  # begin and tick of the first digest in which two members differ
    since: float = inf  # when that was found
    text: str = ""  # who differs; "": not reported in this generation
    search: ValueSearch | None = None
    # With --divergence restore:
    equal: int = 0  # see CommitsCompared
    compared: int = 0
    pending_since: float = inf  # since when the digests of a newer commit are awaited
    absent: frozenset[WorkerId] = frozenset()  # members that make no commits, so none of theirs is awaited
    odd: tuple[WorkerId, ...] = ()  # that are replaced when the generation ends
    ends_at: float = inf  # the generation, whether or not the search has found the value


class Host(Struct, frozen=True, gc=False):
    """A host that discovery has named at least once."""

    name: str
    order: int = 0  # in discovery's answer
    slots: int = 0  # 0: not to be used
    is_named: bool = True  # in discovery's last answer
    rack: str = ""  # as discovery names it; "": not known
    slots_ever: int = 0  # the most slots that the host has ever had
    agent: Literal["none", "asked", "joined", "stopping"] = "none"
    draining: str = ""  # why the whole host drains
    deaths: int = 0  # in a row
    dead_slots: frozenset[int] = frozenset()  # the slots of these deaths
    last_death: float = -inf
    cooldowns: int = 0  # in a row
    cooldown_until: float = -inf
    cooldown_reason: str = ""
    notices: int = 0  # preemption notices since discovery last added the host
    gives_way_at: float = -inf  # earlier than cooldown_until: when the job would be below min_np without this host
    may_live_until: float = -inf  # of an unreachable host: its members, or the only holder of a commit, may live
    health: Literal["unknown", "checking", "well", "sick"] = "unknown"  # of ``--health-check``; without it: unknown
    checked_at: float = -inf  # when the last check was ordered
    report: str = ""  # the last report about the host; "": none yet
    reported_at: float = -inf
    loss: str = ""  # why the last agent was lost unexpectedly; "" when another one has connected
    kept: frozenset[tuple[SlotId, CommitId]] = frozenset()  # the copies in its agent's store, as last reported


class Slot(Struct, frozen=True, gc=False):
    """State of one slot. A slot outlives its workers."""

    incarnation: int = 0  # the number of processes that the slot has had
    worker: WorkerId | None = None  # the living worker in the slot
    failures: int = 0  # in a row
    not_before: float = -inf
    gives_way_at: float = -inf  # earlier than not_before: when the job would be below min_np without this slot
    finished: bool = False  # its worker exited with 0 before any worker was READY: the command does not use ``run``
    failure: t.RootCause | None = None  # the first of the row
    retained: CommitId | None = None  # the newest commit in its storage, as last reported, or presumed (reattach.py)
    previous: CommitId | None = None  # the commit in the other buffer
    sealed: CommitId = CommitId(0, 0)  # the newest commit ever reported for the slot, damaged or not
    damaged: tuple[CommitId, ...] = ()  # commits in its buffers that cannot be read, whatever the seals say
    rejected: tuple[CommitId, ...] = ()  # commits in its buffers that are not used (divergence.py)
    age: int = NEWCOMER  # of its next worker in the next world: that of a replaced one, whose rank it takes
    digests: tuple[tuple[CommitId, int], ...] = ()  # of its last commits, with --divergence restore
    misfit: t.RootCause | None = None  # why its last process could not load the state of the job (phases.py)
    barred: bool = False  # no worker is started here any more: it could not load the state of the job


class Worker(Struct, frozen=True, gc=False):
    """State of a living process.

    A worker boots until its first READY. Then it is READY or in a world. In a world: ``joined`` is the present
    generation. Late: the worker was in an ended generation and was not READY in time, so the core does not wait for it.
    """

    id: WorkerId
    started_at: float
    joined: int = 0  # the newest generation whose world the worker received
    first_joined: int = 0  # the oldest such generation
    rank: int | None = None  # in the world of ``joined``
    age: int = NEWCOMER
    ready: t.Ready | None = None  # without commits that are not used (divergence.py)
    said: t.Ready | None = None  # the same as it came, with them
    ready_at: float = inf
    late: bool = False
    reported_at: float = -inf
    place: t.Place = t.Place.BOOT
    ticks: int = 0
    ticks_at: float = -inf  # when ``ticks`` last changed
    moved_at: float = -inf  # when the worker last ended a tick, changed its place, or reported progress
    still_s: float = 0.0  # seconds since then, as last reported by its agent
    trains_since: float | None = None  # when it began to train in its newest world, by its first report of that
    commit: CommitId | None = None  # the newest that was reported
    commit_at: float = -inf  # when the first report of ``commit`` arrived
    lacked: bool = False  # the worker lacked the state when its newest world began
    keeps: bool = True  # the worker keeps commits of its own in its newest world
    draining: str = ""  # why the worker drains
    draining_since: float = inf
    gone: str = ""  # does not count, its exit is awaited: "stopped" (by the core) or "failed" (counts as a failure)
    overdue: bool = False  # it was stopped because it had not ended in time
    answer: tuple[int, bool] | None = None  # to the present hold: ticks, and True if the worker is in the exit gate
    in_gate: bool = False
    suspect_at: float | None = None
    suspect_error: str = ""
    confirmed_at: float | None = None  # verdict OWN
    call: t.CallReport | None = None  # its newest collective call
    waits_since: float = inf  # when the worker began to wait in that call; inf: the worker does not wait there
    pace: tuple[tuple[int, int], ...] = ()  # the last points of its own time in the present world; see types.Stamp
    digests: tuple[tuple[int, int, int], ...] = ()  # the last ones in the present world; see types.CommitDigests
    uses_run: bool = False
    in_round: bool = False  # started together with others, before the command was known to use ``run``

    @property
    def booting(self) -> bool:
        """Return True if the worker is on its way to its first READY, and neither drains nor is gone."""
        return not self.joined and self.ready is None and not self.gone and not self.draining


class Count(NamedTuple):
    """Number of workers of each kind. A rule for a kind with no workers does not search all workers."""

    booting: int = 0
    ready: int = 0
    draining: int = 0
    suspects: int = 0
    still: int = 0  # their agents have seen no movement for DOUBTED


P = ParamSpec("P")
_COUNTED = {"joined", "ready", "gone", "draining", "suspect_at"}  # the fields that decide on the first four kinds
DOUBTED = 0.25  # parts of --heartbeat-timeout without a movement of a member, before links are probed


class Ledger(Struct, frozen=True, gc=False):
    """Counters and times of the whole job."""

    started_at: float | None = None
    ever_ready: bool = False
    kind: Literal["", "elastic", "plain"] = ""  # of the command: it uses ``run``, or does not; "": not known yet
    round: Round | None = None  # unless the command is known to use ``run``
    enough_since: float = inf  # when the free slots became enough for a world of plain workers
    first_user: WorkerId | None = None  # the first worker that used ``run``
    store_joined: bool = False  # a worker has joined the process group that its environment variables describe
    restarts: int = 0  # failed rounds
    highest: CommitId | None = None  # the newest user's commit (tick >= 1) that was ever reported
    durable: CommitId | None = None  # in the newest durable copy, as far as this driver knows
    next_age: int = 0
    no_progress: int = 0  # failed generations in a row without a commit
    no_progress_cause: t.RootCause | None = None  # the first failure of this row
    resets: int = 0  # ends of worlds that count towards --reset-limit
    settled: int = 0  # the newest generation whose end was counted
    own_errors: int = 0  # members of the present generation that ended by an error of their own
    own_error: t.RootCause | None = None  # the first of these errors
    hang: t.Hang | None = None  # the last generation that hung
    outage: t.RootCause | None = None  # the first failure since the last completed tick
    planned_at: float = -inf  # when the world of the last planned change was formed
    released_at: float = -inf  # when the last hold failed
    holds: int = 0  # the number of the last hold
    holds_failed: int = 0  # in a row
    quiet_until: float = -inf  # until this time no worker starts in a recovery, or before a worker was READY
    is_broken: bool = False  # a member has left the newest world, or is dead, so no member can complete a tick
    has_ticked: bool = False  # some world has completed a tick
    stopped_at: float | None = None  # the earliest time at which a member that left the present world ended a tick
    dead_ticks: int = 0  # the most ticks that a dead member of the present world is known to have completed
    dead_unseen: bool = False  # a dead member may have completed more ticks
    down_since: float | None = None  # the time since which training stands still
    losses: Losses = Losses()  # since down_since, without the time
    total: Losses = Losses()  # of all earlier changes
    origins: tuple[Origin, ...] = ()  # of the last generations
    failures: int = 0  # unplanned ends of generations
    failed: int = 0  # the newest generation of these
    account: TimeAccount = TimeAccount()
    ticking: Ticking = Ticking()  # of the present world
    links: Links = Links()
    digests: Digests = Digests()
    rejected: tuple[CommitId, ...] = ()  # newer commits of these generations are not used (divergence.py)
    odd_hosts: tuple[tuple[str, float], ...] = ()  # of the last divergences, with their times
    commits_come: bool = False  # a member has called commit(), whether or not that tick was saved
    commit_warned: bool = False  # the warning that nothing is committed was written


@dataclass(frozen=True, slots=True)
class Membership:
    """The whole state of the core. ``new_membership`` makes it, and only ``step`` changes it."""

    policy: Policy
    phase: Phase
    hosts: Mapping[str, Host]
    slots: Mapping[SlotId, Slot]
    workers: Mapping[WorkerId, Worker]
    world: t.World | None  # the newest one published
    ledger: Ledger
    deadlines: Mapping[str, float]  # by name: the times at which TimePassed may change something, all in the future
    count: Count  # of the living workers
    living: Mapping[str, int]  # how many workers live on a host
    shards: t.Shards

    @property
    def generation(self) -> int:
        """The generation of the newest world; 0: no world yet."""
        return self.world.generation if self.world else 0

    @property
    def phase_name(self) -> str:
        """The phase: ``WAITING``, ``FORMING(g)``, ``RUNNING(g)``, ``FINISHING(g)``, ``FINISHED`` or ``FAILED``."""
        match self.phase:
            case Waiting():
                return "WAITING"
            case Forming():
                return f"FORMING({self.generation + 1})"
            case Running() | Together():
                return f"RUNNING({self.generation})"
            case Stopping():
                return f"STOPPING({self.generation})"
            case Finishing():
                return f"FINISHING({self.generation})"
            case Over(succeeded):
                return "FINISHED" if succeeded else "FAILED"


class Draft:
    """Draft of a Membership that one step changes, with the step's effects and reason. Records are frozen: the draft
    replaces them."""

    def __init__(self, m: Membership, now: float) -> None:
        self.policy = m.policy
        self.phase = m.phase
        self.hosts = dict(m.hosts)
        self.slots = dict(m.slots)
        self.workers = dict(m.workers)
        self.world = m.world
        self.ledger = m.ledger
        self.now = now
        self.effects: list[t.Effect] = []
        self.reason = ""
        self.broken: list[Failure] = []  # facts against the present generation, found in this step
        self.stopped_by = ""  # what stops the job in this step
        self.booting, self.ready, self.draining, self.suspects, self.still = m.count
        self._doubted_s = DOUBTED * m.policy.heartbeat_timeout_s
        self.living = dict(m.living)
        self.shards = m.shards
        self._slot_ids: dict[str, set[int]] = {}
        self._members: tuple[t.World | None, list[Worker]] | None = None  # of this world, until a worker changes
        self._by_discovery: list[Host] | None = None  # until a host changes

    def freeze(self, deadlines: Mapping[str, float]) -> Membership:
        """Return the state after this step."""
        return Membership(
            self.policy,
            self.phase,
            self.hosts,
            self.slots,
            self.workers,
            self.world,
            self.ledger,
            deadlines,
            Count(self.booting, self.ready, self.draining, self.suspects, self.still),
            self.living,
            self.shards,
        )

    @property
    def generation(self) -> int:
        return self.world.generation if self.world else 0

    def time_to_give_up_s(self) -> float:
        """Return the seconds that a job with too few workers waits before it ends."""
        return self.policy.elastic_timeout_s if self.generation else self.policy.start_timeout_s

    def note(self, event: Callable[P, CommonFields], /, *args: P.args, **values: P.kwargs) -> None:
        """Write an event of the event file."""
        self.effects.append(t.Note(name_of(event), (("generation", self.generation), *values.items())))

    def note_waiting(self, what: str, who: str, remedy: str = "") -> None:
        """Write what the job waits for, who is missing, and what may help."""
        fields: WaitingNote = {"for": what, "who": who}
        if remedy:
            fields["remedy"] = remedy
        self.note(WaitingNote, **fields)

    def warn(self, text: str) -> None:
        self.note(Warning, text=text)

    def members(self) -> list[Worker]:
        """Return the living members of the newest world, by rank."""
        if self._members is None or self._members[0] is not self.world:
            self._members = self.world, living_members(self)
        return self._members[1]

    def add(self, worker: Worker) -> None:
        self._members = None
        self._count(worker, 1)
        self.living[worker.id.host] = self.living.get(worker.id.host, 0) + 1
        self.workers[worker.id] = worker

    def remove(self, worker: Worker) -> None:
        self._members = None
        self._count(self.workers.pop(worker.id), -1)
        self.living[worker.id.host] -= 1

    def put(self, worker: Worker, **changes: Any) -> Worker:
        self._members = None
        changed, before = replace(worker, **changes), self.workers[worker.id]
        if not _COUNTED.isdisjoint(changes):
            self._count(before, -1)
            self._count(changed, 1)
        elif before.still_s != changed.still_s:
            self.still += (changed.still_s >= self._doubted_s) - (before.still_s >= self._doubted_s)
        self.workers[worker.id] = changed
        return changed

    def _count(self, worker: Worker, by: int) -> None:
        self.booting += by * worker.booting
        self.ready += by * (worker.ready is not None and not worker.gone)
        self.draining += by * (worker.draining != "" and not worker.gone)
        self.suspects += by * (worker.suspect_at is not None)
        self.still += by * (worker.still_s >= self._doubted_s)

    def by_discovery(self) -> list[Host]:
        """Return all hosts that are or were known, in discovery's order. Hosts without slots come last."""
        if self._by_discovery is None:
            self._by_discovery = by_discovery(self)
        return self._by_discovery

    def put_host(self, host: Host, **changes: Any) -> Host:
        self._by_discovery = None
        changed = replace(host, **changes)
        self.hosts[host.name] = changed
        return changed

    def put_slot(self, slot_id: SlotId, **changes: Any) -> Slot:
        before = self.slots.get(slot_id)
        if before is None and self._slot_ids:
            self._slot_ids.setdefault(slot_id.host, set()).add(slot_id.slot)
        changed = self.slots[slot_id] = replace(before or NEW_SLOT, **changes)
        return changed

    def slots_of(self, host: str) -> set[int]:
        """Return the known slots of a host."""
        if not self._slot_ids:
            for name, index in self.slots:
                self._slot_ids.setdefault(name, set()).add(index)
        return self._slot_ids.get(host, set())

    def in_round(self, worker: Worker) -> bool:
        """Return True if the worker was started together with others, and the command is not known to use ``run``."""
        return worker.in_round and self.ledger.round is not None

    def update_ledger(self, **changes: Any) -> None:
        self.ledger = replace(self.ledger, **changes)

    def update_shards(self, **changes: Any) -> None:
        self.shards = replace(self.shards, **changes)

    def ready_workers(self) -> Iterator[Worker]:
        return (w for w in self.workers.values() if w.ready is not None and not w.gone)

    def root_cause(self, worker: Worker, reason: str, error: str = "") -> t.RootCause:
        """Return a root cause with ``reason`` and the known facts about ``worker``."""
        return t.RootCause(reason, worker.id, worker.rank, worker.joined, error=error)

    def breaks(self, worker: Worker) -> bool:
        """Return True if the end of this worker breaks the present generation."""
        return worker.joined > 0 and worker.joined == self.generation


NEW_SLOT = Slot()


def fields_of(worker: WorkerId) -> WorkerFields:
    """Return the fields that name a worker in an event."""
    return {"worker": str(worker), "host": worker.host, "slot": worker.slot}


def living_members(m: Draft | Membership) -> list[Worker]:
    """Return the living members of the newest world, by rank. A rule uses ``Draft.members``, which remembers them."""
    if m.world is None:
        return []
    generation, workers = m.world.generation, m.workers
    found = [workers.get(placement.worker) for placement in m.world.members]
    return [w for w in found if w is not None and w.joined == generation and not w.gone]


def is_live(m: Draft | Membership) -> bool:
    """Return True if the present generation may still complete ticks."""
    return isinstance(m.phase, Running) or (isinstance(m.phase, Forming) and m.phase.at_tick is not None)


def by_discovery(d: Draft | Membership) -> list[Host]:
    """Return all hosts, in the order of ``Draft.by_discovery``. A rule uses that method, which remembers them."""
    return sorted(d.hosts.values(), key=lambda host: (not host.slots, host.order, host.name))
