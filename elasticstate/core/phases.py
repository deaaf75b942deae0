"""The phases of a job, and why a generation has ended. Frozen values.

The phases and their transitions (one ``become_`` function per entry)::

    Waiting ──────────► Running ◄───────┐        ┌─► Over
       ▲                 │  │           │        │
       │     END(K), END │  │ all in    │        │  from every phase
       │                 ▼  │ the gate  │        │
       └───────────── Forming ──────────┘        │
                            │                    │
                            └──► Finishing ──────┘

A signal to stop the job changes Running to Stopping, a kind of Finishing, and every other phase to Over.

A world of plain workers (which do not use ``run``) has one phase, Together, between Waiting and Waiting or Over.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from msgspec import Struct

from elasticstate.core.types import Placement, RootCause, WorkerId

FailureKind = Literal["own", "lost", "reported", "drain"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Unplanned end of a generation. ``kind`` own: a worker ended by itself on a living host; reported: a worker
    reported the generation as broken, and no death is known (yet)."""

    cause: RootCause
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

    members: tuple[Placement, ...]
    since: float
    failure: Failure | None = None  # the first failure of a member
    ends_at: float = inf  # after the failure, other workers may fail in the same way until this time
    end: str = ""  # why its workers are stopped
    exits_since: float = inf  # since a first worker has exited with 0
    noticed: bool = False  # who has not exited was reported
