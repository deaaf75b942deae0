"""Events of the event file: names, fields and types, in one place. A class is an event, unless it ends in ``Fields``.

The core writes them with ``Draft.note``, the driver with ``Journal.event``, and ``history/`` reads them. The table in
docs/reference/events.md is made from the classes and from the comments of their fields (docs/hooks/pages.py).
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict, Union

if TYPE_CHECKING:
    from typing_extensions import NotRequired
else:
    NotRequired = Union  # ``Union[str]`` is ``str``


@cache
def name_of(event: object) -> str:
    """Return the name of an event in the file: ``host_added`` for the class ``HostAdded``."""
    return re.sub(r"\B(?=[A-Z])", "_", str(getattr(event, "__name__", ""))).lower()


def by_name() -> dict[str, Any]:
    """Return the classes of all events."""
    classes = [value for value in globals().values() if hasattr(value, "__required_keys__")]
    return {name_of(found): found for found in classes if not found.__name__.endswith("Fields")}


class CommonFields(TypedDict, total=False):
    time: float
    event: str
    job: str
    generation: int


class WorkerFields(CommonFields):
    worker: str
    host: str
    slot: int


class TimeFields(CommonFields):
    wall_s: float
    goodput_s: float
    badput_s: dict[str, float]


class LossFields(CommonFields):
    downtime_s: float | None
    commits_lost: int
    ticks_lost: int
    lower_bounds: list[str]
    uncommitted_s: NotRequired[float]  # if the job had never committed
    unfinished_s: NotRequired[float]  # if any


class FigureFields(LossFields, TimeFields):
    generations: int
    failures: int
    goodput: float | None


class CallFields(CommonFields):
    call: str | None
    group: str | None
    number: int | None  # of the collective; null: none found


class WhereFields(CallFields):
    entered: list[int]  # ranks
    missing: list[int]  # ranks
    silent: list[int]  # ranks that could not report
    lines: dict[str, str]  # of code by rank: `hang`: of each missing rank; `no_tick`: of each rank
    stacks: dict[str, str]  # by rank: of each missing rank; `no_tick`: also one of each line
    text: str


# -------------------------------------------------------------------------------------------------------------- the job


class JobStarted(CommonFields):
    pid: int
    command: list[str]
    np: int
    min_np: int
    max_np: int | None
    np_multiple: int


class JobFinished(FigureFields):
    status: str  # succeeded, failed, or stopped by a signal
    driver: int  # its epoch


class RootCause(CommonFields):
    reason: str
    worker: str | None
    rank: int | None
    in_generation: int
    exit_code: int | None
    signal: int | None
    error: str  # traceback or end of stderr


WaitingFields = TypedDict("WaitingFields", {"for": str})  # what


class Waiting(WaitingFields, CommonFields):
    who: str  # is missing
    remedy: NotRequired[str]  # if ticks differ


class Warning(CommonFields):
    text: str


class DurableCopy(CommonFields):
    state: str  # saved or failed
    host: str
    folder: str
    failures: int  # saved: in a row before it; failed: of the job
    commit: NotRequired[list[int]]  # saved: generation and tick
    bytes: NotRequired[int]  # saved
    seconds: NotRequired[float]  # saved: since its begin
    kind: NotRequired[str]  # failed: [kinds](../guides/durable-copies.md#failing-storage-never-stops-training)
    reason: NotRequired[str]  # failed


class Replication(CommonFields):
    commit: list[int] | None  # the newest replicated one: generation and tick
    age_s: float | None
    replicated: int
    failed: int
    seconds: float
    bytes: int
    memory_bytes: int
    reason: NotRequired[str]  # of the last failure, if any


class Stall(CommonFields):
    call: str
    seconds: float  # since the first rank waits
    waiting: list[int]  # ranks
    missing: list[int]  # ranks
    who: str  # the missing workers, with their last calls


class StallEnded(CommonFields):
    call: str
    seconds: float
    reason: str


class Hang(WhereFields):
    ended: int  # generation


class NoTick(WhereFields):
    seconds: float  # since the last tick, or report of progress
    ticks: int  # completed in this generation


class NoTickEnded(CommonFields):
    seconds: float
    goes_on: bool  # true: a tick or progress was reported
    reason: str


class Straggler(WorkerFields):
    rank: int
    factor: float  # its own time, divided by the median of the others'
    ticks: int  # that were compared


class StragglerEnded(WorkerFields):
    rank: int
    seconds: float  # since it was named
    reason: str


class Divergence(CommonFields):
    commit: list[int]  # generation and tick
    ranks: list[int]  # that differ from most others, or all if no values are those of most ranks
    hosts: list[str]  # of these ranks
    groups: list[list[int]]  # ranks with equal values, the most first
    replaced: list[str]  # workers of these ranks, with --divergence restore; new ones take their ranks
    suspects: list[str]  # those of these hosts that differed before, within an hour
    text: str


class DivergentValue(CommonFields):
    commit: list[int]  # the first known one that differs: generation and tick
    value: str  # the first one that differs in it


class DriverRestarted(CommonFields):
    epoch: int
    host: str  # where the driver runs
    back: list[str]  # hosts
    lost: list[str]  # hosts


class RecordKept(CommonFields):
    hosts: list[str]  # whose agents keep the record of the job; empty: the driver's machine alone
    standbys: list[str]  # hosts


class OutputBlocked(CommonFields):
    host: str | None  # for the driver
    output: str
    reason: str
    workers: list[str]  # that wait for it


class OutputResumed(CommonFields):
    host: str | None  # for the driver
    output: str
    dropped_bytes: int


# ---------------------------------------------------------------------------------------------------------------- hosts


class HostAdded(CommonFields):
    host: str
    slots: int


class HostRemoved(CommonFields):
    host: str


class HostDraining(CommonFields):
    host: str
    reason: str  # the source of the preemption notice


class HostCooldown(CommonFields):
    host: str
    seconds: float
    reason: str


class AgentJoined(CommonFields):
    """The driver adds the process id."""

    host: str
    pid: NotRequired[int | None]


class AgentLost(CommonFields):
    host: str
    reason: str


class LinkCut(CommonFields):
    host: str  # gets no answer from
    peer: str


class LinkRestored(CommonFields):
    host: str
    peer: str
    seconds: float  # since it was known to be cut


# -------------------------------------------------------------------------------------------------------------- workers


class WorkerStarted(WorkerFields):
    pass


class WorkerReady(WorkerFields):
    pass


class WorkerExited(WorkerFields):
    """The driver adds what the core does not know."""

    rank: int | None
    exit_code: int | None
    signal: int | None  # its number
    expected: bool  # true: it was asked to leave or to stop, or has finished, so it is not lost
    pid: NotRequired[int | None]
    error: NotRequired[str]  # traceback or end of stderr
    time_ns: NotRequired[int]


class WorkerUnresponsive(CommonFields):
    worker: str
    reason: str


# --------------------------------------------------------------------------------------------------------------- worlds


class Hold(CommonFields):
    cause: str


class Release(CommonFields):
    cause: str


class PlainEndFields(CommonFields, total=False):
    attempt: int  # if a worker without `run` has failed
    attempts: int | None  # of how many; null: no limit
    error: str  # of that worker
    planned: bool  # true: workers without `run` are stopped by plan


class End(PlainEndFields):
    cause: str
    at: int | str  # tick K, or `now`


class WorldFormed(CommonFields):
    size: int
    hosts: int
    joined: list[str]
    left: list[str]
    root: int
    synced: int
    plain: NotRequired[bool]  # true: the workers do not use `run`


class GenerationFinished(TimeFields):
    redone_earlier_s: float


class Sync(CommonFields):
    worker: str
    bytes: int
    seconds: float


class TrainingResumed(LossFields):
    pass
