"""What the core remembers: hosts, slots, workers, the phase, the account of the job. Frozen; a step works on a Draft.

The phases, and how one gets from one to the next (one ``become_`` function per entry)::

    Waiting ──────────► Running ◄───────┐        ┌─► Over
       ▲                 │  │           │        │
       │     END(K), END │  │ all in    │        │  from every phase
       │                 ▼  │ the gate  │        │
       └───────────── Forming ──────────┘        │
                            │                    │
                            └──► Finishing ──────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from elasticstate.core.assignment import NEWCOMER
from elasticstate.core.policy import Policy
from elasticstate.core.types import CommitId, Effect, Note, RootCause, SlotId, WorkerId, WorkerReady, World

FailureKind = Literal["own", "lost", "reported", "drain"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a generation ended without a plan. ``kind`` own: a worker's own end on a living host; reported: somebody
    found it broken, and no death is known (yet)."""

    cause: RootCause
    kind: FailureKind
    own_error: bool = False  # an exit with a code other than 0, without a signal


class Host(Struct, frozen=True, gc=False):
    """A host that discovery has named at least once."""

    name: str
    order: int = 0  # in discovery's answer
    slots: int = 0  # 0: not wanted
    seats: int = 0  # slots that it has ever had
    agent: Literal["none", "asked", "joined", "stopping"] = "none"
    leaving: str = ""  # why the whole host drains
    deaths: int = 0  # in a row
    dead_slots: frozenset[int] = frozenset()  # whose workers these were
    last_death: float = -inf
    cooldowns: int = 0  # in a row
    cooldown_until: float = -inf
    cooldown_reason: str = ""
    notices: int = 0  # since discovery has last named it anew
    gives_way_at: float = -inf  # earlier than cooldown_until: when the job would be below min_np without this host
    may_live_until: float = -inf  # out of reach; workers of the newest world may be at it there until they give up
    heard: str = ""  # what was last heard of it; "": nothing yet
    heard_at: float = -inf

    def rests(self, now: float) -> bool:
        """Whether it is left alone because it had notice."""
        return self.notices > 0 and self.cooldown_until > now


class Slot(Struct, frozen=True, gc=False):
    """One seat. It outlives its workers."""

    incarnation: int = 0  # processes that it has had
    worker: WorkerId | None = None  # the living one
    failures: int = 0  # in a row
    not_before: float = -inf
    gives_way_at: float = -inf  # earlier than not_before: when the job would be below min_np without this slot
    finished: bool = False  # its worker exited with 0 before anybody was READY: a command that does not use ``run``
    failure: RootCause | None = None  # the first of the row
    memory: CommitId | None = None  # the newest commit in its memory, as was last heard; it outlives the workers, too


class Worker(Struct, frozen=True, gc=False):
    """A living process.

    Boots until its first READY; then it is READY or in a world. In a world: ``joined`` is the present generation.
    Late: it was in an ended generation and has not been READY in time, so nobody waits for it any more.
    """

    id: WorkerId
    started_at: float
    joined: int = 0  # the newest generation that it was given a world of
    first_joined: int = 0  # the oldest
    rank: int | None = None  # in that world
    age: int = NEWCOMER
    ready: WorkerReady | None = None
    ready_at: float = inf
    late: bool = False
    heard_at: float = -inf
    place: str = "boot"
    ticks: int = 0
    ticks_at: float = -inf  # when ``ticks`` last changed
    commit: CommitId | None = None  # the newest heard of
    lacked: bool = False  # the state, when its newest world began
    leaving: str = ""  # why it drains
    leaving_at: float = inf
    gone: str = ""  # it counts no more, its exit is awaited: "stopped" (told to) or "failed" (counts as a failure)
    answer: tuple[int, bool] | None = None  # to the present hold: ticks, and whether it stands in the gate
    in_gate: bool = False
    suspect_at: float | None = None
    suspect_error: str = ""
    confirmed_at: float | None = None  # verdict OWN

    @property
    def booting(self) -> bool:
        """On its way to its first READY."""
        return not self.joined and self.ready is None and not self.gone and not self.leaving


class Count(NamedTuple):
    """How many workers are of each kind: a rule for one that there is none of need not look at all workers."""

    booting: int = 0
    ready: int = 0
    leaving: int = 0
    suspects: int = 0


_COUNTED = {"joined", "ready", "gone", "leaving", "suspect_at"}  # the fields that decide on the kinds


@dataclass(frozen=True, slots=True)
class Waiting:
    """Too few are READY, or the newest commit is in the memory of a slot that is not. In: at the start, and when an
    ended generation leaves too few. Out: a world, or the end."""

    since: float
    noticed: bool = False
    memory_since: float | None = None  # enough are READY, but the newest commit is awaited


@dataclass(frozen=True, slots=True)
class Forming:
    """Generation ``ended`` is over, its living members are awaited. Out: all are READY, or the time-out."""

    since: float
    ended: int
    at_tick: int | None  # None: now
    cause: str
    failure: Failure | None  # None: planned
    clock: float | None  # the regroup time-out counts from here; None: nobody has reached the tick yet
    noticed: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A world is published. Out: END at a tick or now, or all members stand in the gate."""

    since: float
    first_tick: bool = False
    hold_since: float | None = None
    hold_cause: str = ""
    gate_since: float | None = None  # when the first member entered
    noticed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finishing:
    """The gate is open: the members exit in their own time. Out: all have."""

    since: float
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """FINISHED or FAILED. Nothing has an effect any more."""

    succeeded: bool


Phase = Waiting | Forming | Running | Finishing | Over


class Ledger(Struct, frozen=True, gc=False):
    """What is counted over the whole job."""

    started_at: float | None = None
    ever_ready: bool = False
    highest: CommitId | None = None  # the newest commit of a user (tick >= 1) that was ever seen
    next_age: int = 0
    no_progress: int = 0  # failed generations in a row without a commit
    no_progress_cause: RootCause | None = None  # the first of them
    failed_at: tuple[float, ...] = ()  # when generations have failed, as far back as --reset-limit looks
    own_errors: int = 0  # members of the present generation that ended by an error of their own
    own_error: RootCause | None = None  # the first of them
    outage: RootCause | None = None  # the first failure since the last completed tick
    planned_at: float = -inf  # when the last planned change's world was formed
    hold_not_before: float = -inf
    holds: int = 0  # the number of the last one
    holds_failed: int = 0  # in a row
    quiet_until: float = -inf  # no boot competes with a recovery until then
    is_broken: bool = False  # the newest world: a member has left it, or is dead, so no other one can make a tick
    down_since: float | None = None  # training stands still since then
    ticks_lost: int = 0
    downtime_s: float = 0.0  # of the whole job


@dataclass(frozen=True, slots=True)
class Membership:
    """The whole state of the core. Made by ``new_membership``, changed by ``step`` alone."""

    policy: Policy
    phase: Phase
    hosts: Mapping[str, Host]
    slots: Mapping[SlotId, Slot]
    workers: Mapping[WorkerId, Worker]
    world: World | None  # the newest one published
    ledger: Ledger
    deadline: float | None  # when TimePassed would change something
    count: Count  # of the living workers
    living: Mapping[str, int]  # how many workers live on a host

    @property
    def generation(self) -> int:
        """Of the newest world; 0: none yet."""
        return self.world.generation if self.world else 0

    @property
    def phase_name(self) -> str:
        """``WAITING``, ``FORMING(g)``, ``RUNNING(g)``, ``FINISHING(g)``, ``FINISHED`` or ``FAILED``."""
        match self.phase:
            case Waiting():
                return "WAITING"
            case Forming():
                return f"FORMING({self.generation + 1})"
            case Running():
                return f"RUNNING({self.generation})"
            case Finishing():
                return f"FINISHING({self.generation})"
            case Over(succeeded=True):
                return "FINISHED"
            case _:
                return "FAILED"

    @property
    def downtime_s(self) -> float:
        """Time in which no world was training, between the first world's formation and now, in all."""
        return self.ledger.downtime_s


class Draft:
    """A Membership that one step may change, with what the step says. The records stay frozen: they are replaced."""

    def __init__(self, m: Membership, now: float) -> None:
        self.policy = m.policy
        self.phase = m.phase
        self.hosts = dict(m.hosts)
        self.slots = dict(m.slots)
        self.workers = dict(m.workers)
        self.world = m.world
        self.ledger = m.ledger
        self.now = now
        self.effects: list[Effect] = []
        self.reason = ""
        self.broken: list[Failure] = []  # facts against the present generation, found in this step
        self.booting, self.ready, self.leaving, self.suspects = m.count
        self.living = dict(m.living)
        self._wake = inf
        self._seats: dict[str, set[int]] = {}

    def freeze(self) -> Membership:
        return Membership(
            self.policy,
            self.phase,
            self.hosts,
            self.slots,
            self.workers,
            self.world,
            self.ledger,
            self._wake if self._wake < inf else None,
            Count(self.booting, self.ready, self.leaving, self.suspects),
            self.living,
        )

    @property
    def generation(self) -> int:
        return self.world.generation if self.world else 0

    def due(self, at: float) -> bool:
        """Whether ``at`` has come. If not, the next deadline is not later than ``at``."""
        if self.now >= at:
            return True
        self._wake = min(self._wake, at)
        return False

    def time_to_give_up_s(self) -> float:
        """For how long the job waits, at most, when too few are there."""
        return self.policy.elastic_timeout_s if self.generation else self.policy.start_timeout_s

    def become(self, phase: Phase) -> None:
        """Enter a phase: what the last one waited for counts no more."""
        self.phase = phase
        self._wake = inf

    def note(self, event: str, **values: object) -> None:
        self.effects.append(Note(event, (("generation", self.generation), *values.items())))

    def warn(self, text: str) -> None:
        self.note("warning", text=text)

    def add(self, worker: Worker) -> None:
        self._count(worker, 1)
        self.living[worker.id.host] = self.living.get(worker.id.host, 0) + 1
        self.workers[worker.id] = worker

    def remove(self, worker: Worker) -> None:
        self._count(self.workers.pop(worker.id), -1)
        self.living[worker.id.host] -= 1

    def put(self, worker: Worker, **changes: Any) -> Worker:
        changed = replace(worker, **changes)
        if not _COUNTED.isdisjoint(changes):
            self._count(self.workers[worker.id], -1)
            self._count(changed, 1)
        self.workers[worker.id] = changed
        return changed

    def _count(self, worker: Worker, by: int) -> None:
        self.booting += by * worker.booting
        self.ready += by * (worker.ready is not None and not worker.gone)
        self.leaving += by * (worker.leaving != "" and not worker.gone)
        self.suspects += by * (worker.suspect_at is not None)

    def put_host(self, host: Host, **changes: Any) -> Host:
        changed = replace(host, **changes)
        self.hosts[host.name] = changed
        return changed

    def put_slot(self, seat: SlotId, **changes: Any) -> Slot:
        before = self.slots.get(seat)
        if before is None and self._seats:
            self._seats.setdefault(seat.host, set()).add(seat.slot)
        changed = self.slots[seat] = replace(before or NEW_SLOT, **changes)
        return changed

    def seats_of(self, host: str) -> set[int]:
        """The slots of a host of which anything is known."""
        if not self._seats:
            for name, index in self.slots:
                self._seats.setdefault(name, set()).add(index)
        return self._seats.get(host, set())

    def account(self, **changes: Any) -> None:
        self.ledger = replace(self.ledger, **changes)

    def ready_workers(self) -> Iterator[Worker]:
        return (w for w in self.workers.values() if w.ready is not None and not w.gone)

    def root_cause(self, worker: Worker, reason: str, error: str = "") -> RootCause:
        """``reason`` of ``worker``, with all that is known of it."""
        return RootCause(reason, worker.id, worker.rank, worker.joined, error=error)

    def breaks(self, worker: Worker) -> bool:
        """Whether the end of this worker concerns the present generation."""
        return worker.joined > 0 and worker.joined == self.generation


NEW_SLOT = Slot()


def by_discovery(d: Draft | Membership) -> list[Host]:
    """All hosts that are or were known, in discovery's order; those that are gone come last."""
    return sorted(d.hosts.values(), key=lambda host: (not host.slots, host.order, host.name))
