"""Types of the core: identifiers, worlds, events (input), effects (output). All are frozen data for msgspec."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import NamedTuple

from msgspec import Struct

from elasticstate.core.ids import CommitId as CommitId, HostSlots as HostSlots, SlotId as SlotId, WorkerId as WorkerId

SHOWN = 16
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch prints it before each line, if there is a process group
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*: ")
_OF_A_COLLECTIVE = re.compile(  # errors of torch 2.13 for a connection that ends, and for a member that does not answer
    r"^(\[rank\d+\]: )?(RuntimeError: (\[\S*gloo/|Gloo connectFullMesh failed|.*monitoredBarrier)|"
    r"torch\.distributed\.Dist\w+Error: |elasticstate\.errors\.CollectiveError: )",
    re.MULTILINE,
)


def number_of(count: int, what: str) -> str:
    """Return ``1 worker``, ``3 workers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def listed(items: Iterable[str], separator: str = ", ", shown: int = SHOWN, count: int | None = None) -> str:
    """Return the first items, and the number of the others. ``count``: of all, if ``items`` lacks some."""
    items = list(items)
    hidden = (len(items) if count is None else count) - shown
    more = [f"and {hidden} more"] if hidden > 0 else []
    return separator.join(items[:shown] + more)


def ranks_text(ranks: Sequence[int | None]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(map(str, ranks))}"


def exception_line(error: str) -> str:
    """Return the line of a traceback, with or without stack, that has the exception; "" if it is another text."""
    lines = _RANK.sub("", error.rstrip()).splitlines()
    if len(lines) == 1:
        return lines[0] if _EXCEPTION.match(lines[0]) else ""
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if not frames or not lines[0].startswith("Traceback ("):
        return ""
    return next((line for line in lines[frames[-1] :] if not line.startswith(" ")), "")


class Message(Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages of the control plane: an array ``[tag, field, ...]`` in MessagePack.

    What an agent reports, and what the core answers, are messages themselves: an event or an effect has one shape,
    from the process that makes it to the one that acts on it.
    """


class Placement(Struct, frozen=True, array_like=True, gc=False):
    """Position of one worker in a world, in the terms of Horovod and torchrun; see docs/how-it-works.md."""

    worker: WorkerId
    rank: int
    local_rank: int  # the slot: the device index, sticky for the life of the worker
    local_size: int
    local_place: int  # place among the workers of its host, without gaps
    cross_rank: int  # index of the host
    cross_size: int  # number of hosts

    @property
    def local_leader(self) -> bool:
        """True for exactly one worker per host and world."""
        return self.local_place == 0


class PlainPlace(Placement, frozen=True, array_like=True, gc=False):
    """Position of a worker that does not use ``run``, for torchrun's environment variables. Valid until its end."""

    generation: int  # the number of this world
    size: int
    restarts: int  # failed worlds before this one
    max_restarts: int | None  # None: no limit
    store_host: str  # the host whose agent provides the store
    store: str = ""  # its "address:port", filled in by the driver


# -------------------------------------------------------------------------------------------------------------- layouts
# Layouts of generations: which shards each slot holds. Frozen values; the rules for them are in sharded.py.


class ShardLayout(Struct, frozen=True, gc=False):
    """Shards of a generation: the digest of each slot of its world. All members have attached."""

    generation: int
    digests: tuple[tuple[SlotId, int], ...]


class Replication(Struct, frozen=True, gc=False):
    """Replication in progress of one commit."""

    commit: CommitId
    copies: frozenset[tuple[SlotId, str]]  # all of them: slot, and host that keeps the copy
    missing: frozenset[tuple[SlotId, str]]  # those that are not reported yet
    since: float


class Shards(Struct, frozen=True, gc=False):
    """State of a sharded job. Without a layout the job is not sharded."""

    layouts: tuple[ShardLayout, ...] = ()  # of the generations whose commits may be the line, the newest last
    ended: tuple[tuple[int, tuple[WorkerId, ...]], ...] = ()  # worlds without a layout: the generation, and the members
    line: CommitId | None = None  # newest commit that all members of the newest world are known to have sealed
    line_at: float = -inf  # when that became known
    replicated: CommitId | None = None  # newest commit whose replication is complete
    replicated_at: float = -inf
    forgotten: CommitId | None = None  # connected agents keep no copies of older commits, except of ``replicated``
    replication: Replication | None = None
    failures: int = 0  # replications in a row that were given up
    trouble: str = ""  # why the last of them was given up
    not_before: float = -inf  # no replication begins before this time
    refusals: tuple[tuple[str, float], ...] = ()  # hosts that refused a copy, and until when others come first


@dataclass(frozen=True, slots=True)
class DurableCopySaved:
    """A durable copy of this commit is complete."""

    commit: CommitId


class DurableSource(Message, frozen=True):
    """Storage with durable copies, from which a world starts: from the newest one that is intact.

    ``is_required``: the job has committed, so it must not begin anew. ``is_sharded``: members hold commits with shards
    that are no use, so only a copy of a sharded state will do.
    """

    place: str  # path or URL
    timeout_s: float  # without progress
    is_required: bool
    is_sharded: bool = False


class CopyFigures(NamedTuple):
    """Copies of one host, or of several. The bytes for replication count since the agent has started."""

    memory_bytes: int = 0  # of complete and incomplete copies, and of files for the next ones
    sent_bytes: int = 0
    received_bytes: int = 0


class CopyOf(Struct, frozen=True, array_like=True, gc=False):
    """Copy of the commit of a slot, in the memory of a host: the slot's own buffer there, or a kept copy."""

    host: str
    slot: SlotId
    commit: CommitId


class ShardSource(Struct, frozen=True, array_like=True, gc=False):
    """Copy from which a worker may read the shards that belong to a digest."""

    digest: int  # of the shards; equal digests: the same shards
    copy: CopyOf


class CopyKept(Message, frozen=True):
    """The agent of ``host`` keeps a copy of the commit of ``slot``, complete and verified."""

    host: str
    slot: SlotId
    commit: CommitId


class CopyDropped(Message, frozen=True):
    """The agent of ``host`` has no such copy: the copy is damaged, could not be made, or was refused."""

    host: str
    slot: SlotId
    commit: CommitId
    reason: str = ""


class CommitDamaged(Message, frozen=True):
    """The commit in a buffer of ``slot`` has a wrong checksum: the agent of its host has read it."""

    slot: SlotId
    commit: CommitId


@dataclass(frozen=True, slots=True)
class Replicate:
    """Make the copies of a commit that are missing: of each of these slots, on this host. A slot's own host copies its
    buffer."""

    commit: CommitId
    copies: tuple[tuple[SlotId, str], ...]


class StopReplication(Message, frozen=True):
    """All agents cancel their last order to replicate a commit, and keep the copies that exist."""


class ForgetCopies(Message, frozen=True):
    """Agents remove the kept copies of commits older than ``before``, except those of ``besides``, and accept no more
    copies of commits older than ``before``.

    ``host``: only the agent of this host; "": all.
    """

    before: CommitId
    besides: CommitId | None = None
    host: str = ""


CopyEffect = Replicate | StopReplication | ForgetCopies


class CallReport(Message, frozen=True):
    """The newest collective call of a worker in ``generation``.

    Process set and number identify the call: they are equal on all ranks.
    """

    generation: int
    process_set: int  # 0: all ranks of the world
    ranks: tuple[int, ...]  # of the process set; (): all ranks of the world
    number: int
    call: str
    waiting_s: float | None  # seconds for which the worker has waited in the call; None: the worker has left the call


class WatchCalls(Message, frozen=True):
    """Order to all agents: forward the reports of all calls in ``generation``, from the newest ones on.

    ``on`` False: forward only reports of workers that have waited for --stall-check-time.
    """

    generation: int
    on: bool


class Collective(Message, frozen=True):
    """One collective. Group and number are equal on all ranks that enter it."""

    group: str  # name of the process group
    number: int  # in the group, from 1
    text: str  # operation and sizes


class CollectivesReport(Message, frozen=True):
    """The last collectives that a worker has entered in ``generation``, and the stack of its main thread.

    Sent when the generation has ended because it hangs, and as the answer to AskWhere.
    """

    generation: int
    collectives: tuple[Collective, ...]
    stack: str
    line: str = ""  # the innermost line of it that is the script's own: ``train.py:14 in train: dist.barrier()``


class AskWhere(Message, frozen=True):
    """Order to all members of ``generation``: report where you are. The generation goes on."""

    generation: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a comparison: the collective, and the ranks that have entered it, that have not, and without report."""

    collective: Collective | None  # None: no rank has entered one that another rank has not
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    mixture: str = ""  # the first collective that is another one on some ranks

    def text(self) -> str:
        """Return the finding as a clause."""
        silent = f"no report from {ranks_text(self.silent)}" if self.silent else ""
        if self.mixture:
            return ", ".join(filter(None, (self.mixture, silent)))
        if self.collective is None:
            return silent or "all ranks have entered the same collectives"
        where = f"{self.collective.text} (number {self.collective.number} of {self.collective.group})"
        parts = [f"{where} was entered by {ranks_text(self.entered)}"]
        if self.missing:
            parts.append(f"and not by {ranks_text(self.missing)}")
        return ", ".join(filter(None, (" ".join(parts), silent)))


class Hang(Struct, frozen=True, gc=False):
    """A hang of ``generation``. ``ranks``: its members."""

    generation: int
    ranks: Mapping[str, int]  # by the names of the workers
    reports: Mapping[int, CollectivesReport]  # by rank
    found: Finding | None = None  # after the report is complete


# ------------------------------------------------------------------------------------------- reports of workers
# What a worker sends to its agent, and the agent to the driver, unchanged: the body of FromWorker. A report about a
# generation names it, and has no effect on any other generation.


class Place(IntEnum):
    """Phase of a worker, as on its control page (same numbers in native/sentinel.hpp)."""

    BOOT = 0
    REGROUP = 1
    TRAIN = 2
    GATE = 3
    DONE = 4

    def __str__(self) -> str:
        return self.name.lower()


class Ready(Message, frozen=True, gc=False):
    """READY: the worker waits in ``run``, has left its generation, and its live state equals its commit (I10)."""

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


class HoldAnswer(Message, frozen=True, gc=False):
    """Answer of a worker's sentinel to HOLD(generation): ticks completed, and True if it is in the exit gate."""

    generation: int
    ticks: int
    in_gate: bool
    number: int = 0  # the number of the hold


class GenerationFailure(Message, frozen=True):
    """An exception came out of ``train`` (or of regroup or sync) in ``generation``.

    ``certain``: the worker has proof of a broken generation. Otherwise the worker is a suspect and waits for a verdict.
    """

    generation: int
    certain: bool
    error: str
    hang: bool = False  # the agent reports it: the worker has made no tick for --hang-timeout


class Gate(Message, frozen=True):
    """The worker's ``train`` has returned; the worker is in the exit gate of ``generation``."""

    generation: int
    commit_s: float = 0.0  # see Ready


class First(Message, frozen=True):
    """The worker has completed the first tick of ``generation``."""

    generation: int
    train_s: float = 0.0  # since it began to train
    sync_s: float = 0.0  # from the existence of its process groups until then


class Attached(Message, frozen=True):
    """All members of the worker's world have attached their shards, and have sealed them as ``(generation, 0)``.

    ``digests``: of the shards of each member, by rank.
    """

    generation: int
    digests: tuple[int, ...]


class CommitSealed(Message, frozen=True):
    """The worker has sealed its first commit in a generation. Sent at once, because this commit must not be lost."""

    commit: CommitId


LACKED, OUT_OF_INPUTS = -1, -2
"""In place of a digest: the worker has discarded the commit of this tick; it makes none from this tick on."""


class CommitDigests(Message, frozen=True):
    """Digests of the replicated values of a worker's commits: (tick after which the chain begins, tick, digest).

    ``Stamp.digests`` has those that can wait. ``is_awaited``: the digest is that of one commit, after which the worker
    awaits CommitsCompared, so the agent sends it at once.
    """

    generation: int
    digests: tuple[tuple[int, int, int], ...]
    is_awaited: bool = False


def digests_interval_s(size: int) -> float:
    """Return the longest time between two digests of a worker, in a world of this size: so the driver keeps up."""
    return max(1.0, size / 128)


MOST_PARTS = 256
"""Maximum number of parts of values whose checksums one answer has."""


class DigestQuestion(NamedTuple):
    """Question to a worker about the values with the numbers ``begin`` to ``end`` (0: all) of its commit of a tick.

    Tick 0: about the digests of its last commits.
    """

    tick: int = 0
    begin: int = 0
    end: int = 0


class AskDigests(Message, frozen=True):
    """Order to an agent: ask a worker, which answers with DigestAnswer at its next tick."""

    worker: WorkerId
    generation: int
    question: DigestQuestion


class DigestAnswer(Message, frozen=True):
    """Answer to a question: ticks and digests in turn, or the checksums of equally large parts of the values.

    ``names``: those of the values, if each part is one. ``end``: number of the value after the last part.
    """

    generation: int
    question: DigestQuestion
    parts: tuple[int, ...]
    end: int = 0
    names: tuple[str, ...] = ()


class CommitsCompared(Message, frozen=True):
    """Verdict on the commits of ``generation``, for ``--divergence restore``.

    A worker may overwrite the commit before its newest one if that is not newer than the tick ``equal``. It discards a
    newest commit that is newer, but not newer than ``compared``: others lack it.
    """

    generation: int
    equal: int  # the newest tick whose commit all members have, with equal replicated values
    compared: int  # the newest tick of which that is known, or is known not to be so


class WorkerPreemptionNotice(Message, frozen=True):
    """The worker has received one of ``--preemption-signals``: it drains."""

    signal: int


class Stamp(Message, frozen=True, gc=False):
    """The control page of a living worker, as its agent has read it: a heartbeat.

    ``pace``: new points (tick, time from the begin of the generation to its end without waits for others, in µs).
    ``previous``: the commit in the other buffer. ``still_s``: seconds, by the agent's clock, since the worker ended a
    tick, changed its place, or reported progress.
    """

    place: Place
    generation: int
    ticks: int
    commit: CommitId | None
    commit_s: float = 0.0  # see Ready
    pace: tuple[tuple[int, int], ...] = ()
    previous: CommitId | None = None
    still_s: float = 0.0
    trained_s: float = 0.0  # see Ready
    digests: tuple[tuple[int, int, int], ...] = ()  # new ones: see CommitDigests


Report = (
    Ready
    | HoldAnswer
    | GenerationFailure
    | Gate
    | First
    | Attached
    | CommitSealed
    | CommitDigests
    | DigestAnswer
    | WorkerPreemptionNotice
    | CallReport
    | CollectivesReport
)


# ---------------------------------------------------------------------------------------------------------------- world


class MemberOptions(Struct, frozen=True, array_like=True, gc=False):
    """The values of options that the members of a world need."""

    collective_timeout_s: float
    regroup_timeout_s: float
    verify_sync: bool
    records_ticks: bool
    compares_commits: bool = False
    awaits_verdicts: bool = False  # before a commit is overwritten: see CommitsCompared


class World(Message, frozen=True):
    """The world of one generation: the core makes it, the record holds it, and members receive and show it.

    As an effect it is published. The driver sends to each host the part of it: ``members`` and ``keepers`` there, and
    as many ``sources`` as fit into a message. ``members`` are always in the order of ranks, without gaps.
    """

    generation: int
    members: tuple[Placement, ...]
    size: int
    root: int  # rank of the oldest worker among those that hold the newest commit
    lacking_runs: tuple[tuple[int, int], ...]  # ranks that need the root's state: in a first world all but one do
    store: str  # "address:port" of the TCPStore server of rank 0
    fresh: bool = False  # all members are new processes that have not been in a world before
    is_plain: bool = False  # the members do not use ``run``
    near_runs: tuple[tuple[int, int], ...] = ()  # those that read a commit of the root, or of their keeper, from memory
    line: CommitId | None = None  # the commit line; None: nothing is attached, or no attach is complete
    sources: tuple[ShardSource, ...] = ()  # the readable copies of the line: a slot's own buffer before kept copies
    durable: DurableSource | None = None  # no member holds a usable commit: all start from the newest durable copy
    keepers: tuple[int, ...] = ()  # ranks that keep commits, ascending: the root and one of each host; (): all ranks
    options: MemberOptions = MemberOptions(0.0, 0.0, False, False)  # filled in by the driver, as ``copy_servers`` is
    copy_servers: tuple[tuple[str, str], ...] = ()  # "address:port" by host, for ``sources``
    reader: int = 0  # the member that receives this, as an index of ``members``; filled in by its agent
    start: CommitId | None = None  # with ``--divergence restore``: members with the state go back to this commit

    @property
    def placement(self) -> Placement:
        """The place of the member that has received this world."""
        return self.members[self.reader]

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def lacking(self) -> tuple[int, ...]:
        return from_runs(self.lacking_runs)

    @property
    def near(self) -> tuple[int, ...]:
        return from_runs(self.near_runs)

    @property
    def store_address(self) -> tuple[str, int]:
        host, port = self.store.rsplit(":", 1)
        return host, int(port)

    @property
    def root_slot(self) -> int:
        """The slot of the root, if it is on the reader's host."""
        return next((member.worker.slot for member in self.members if member.rank == self.root), 0)

    @property
    def follows(self) -> int | None:
        """The slot of the keeper whose commits the reader restores; None if it keeps its own."""
        return None if self.keeps(self.rank) else self._member(self.keeper_of(self.rank)).worker.slot

    def keeps(self, rank: int) -> bool:
        """Return True if this rank keeps commits of its own."""
        return not self.keepers or rank in self.keepers

    def keeper_of(self, rank: int) -> int:
        """Return the rank whose commits this rank restores: itself, or a keeper on its host, the root before others."""
        if self.keeps(rank):
            return rank
        host = self._member(rank).worker.host
        mates = [keeper for keeper in self.keepers if self._member(keeper).worker.host == host]
        return self.root if self.root in mates else mates[0]

    def _member(self, rank: int) -> Placement:
        return self.members[rank - self.members[0].rank]


def as_runs(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending numbers as runs [first, last + 1), which are short: all but one lack the state in a first world
    of 10000 members."""
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


class HostDraining(Message, frozen=True):
    """A host has a preemption notice, by a signal to its agent or from the notice command: all its workers drain."""

    host: str
    reason: str


class LinksProbed(Message, frozen=True):
    """The agent of ``host`` has tried to open connections to the other hosts of a ProbeLinks. ``cut``: those of which
    none has answered."""

    host: str
    number: int  # of the ProbeLinks
    cut: tuple[str, ...] = ()


class HealthChecked(Message, frozen=True):
    """The agent of ``host`` has run the health check, as CheckHealth asked. ``fault``: "" if the host is well."""

    host: str
    fault: str = ""


class FromWorker(Message, frozen=True, gc=False):
    """A report of a worker, or its stamp: its agent adds whose it is."""

    worker: WorkerId
    body: Report | Stamp


class WorkerExited(Message, frozen=True):
    """The process has ended. Exactly one of ``exit_code`` and ``signal`` is set."""

    worker: WorkerId
    pid: int  # 0: the process could not be started
    exit_code: int | None
    signal: int | None
    error: str = ""  # the traceback that the worker recorded, or the end of its stderr
    time_ns: int = 0  # unix time of its host: when its exception was raised, or its end was detected; 0: not known
    commits: tuple[CommitId, ...] = ()  # in its slot's buffers after its end, the newest first


class WorkerUnresponsive(Message, frozen=True):
    """No liveness stamp for the heartbeat (or hang) time-out. The agent kills the worker; WorkerExited follows."""

    worker: WorkerId
    reason: str


class WorkerUsesRun(Message, frozen=True):
    """A worker has called ``run`` (or ``join``): the command is elastic."""

    worker: WorkerId


class PlainStoreJoined(Message, frozen=True):
    """A worker has connected to the store of the plain world ``generation``, outside ``run``: the command is plain."""

    generation: int


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


FromAgent = (
    FromWorker
    | WorkerExited
    | WorkerUnresponsive
    | WorkerUsesRun
    | PlainStoreJoined
    | HostDraining
    | LinksProbed
    | HealthChecked
    | CopyKept
    | CopyDropped
    | CommitDamaged
)
"""Events that agents send."""
Event = FromAgent | (
    HostsDiscovered | AgentJoined | AgentLost | DurableCopySaved | StopRequested | TimePassed | Several
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
    has_stdin: bool = False  # it reads what elasticrun reads (``--debug-rank``)
    slots: int = 0  # those of its host, which share its cores with ``--bind``


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


class CheckHealth(Message, frozen=True):
    """The agent of ``host`` runs the health check, and answers with HealthChecked."""

    host: str


@dataclass(frozen=True, slots=True)
class ProbeLinks:
    """Agents try to open connections to the agents of other hosts. Each answers with LinksProbed.

    An order replaces the one before it.
    """

    number: int  # unique in the life of a driver
    peers: tuple[tuple[str, tuple[str, ...]], ...]  # by host: the hosts that its agent probes
    limit_s: float  # time for an answer


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the event file (core/event_file.py): the name and the fields in print order."""

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
    is_confirmed: bool = field(default=False, repr=False)  # an own error of a worker that has not ended yet

    @property
    def follows(self) -> bool:
        """True if the exception is that of a collective: another worker has failed before, or does not answer."""
        return _OF_A_COLLECTIVE.search(self.error) is not None


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job is over. The driver stops the remaining workers and agents."""

    succeeded: bool
    root_cause: RootCause | None = None
    own_error: bool = False  # the script's own error: another attempt would fail in the same way


Effect = (
    StartAgent
    | StopAgent
    | StartWorker
    | StopWorker
    | Hold
    | Release
    | End
    | Sever
    | World
    | Leave
    | Terminate
    | ConfirmOwnError
    | OpenGate
    | WatchCalls
    | AskWhere
    | ProbeLinks
    | CheckHealth
    | AskDigests
    | CommitsCompared
    | CopyEffect
    | Note
    | EndJob
)


# --------------------------------------------------------------------------------------------------------------- limits
# Limits on the slots that discovery may name, so that a mistyped number costs a warning and not the driver.
#
# A step of the core costs time for each slot. The limits leave spare slots and hosts beyond ``--max-np``: those
# replace slots and hosts that fail.


MAX_SLOTS_OF_HOST = 1024
MAX_SLOTS = 65_536


def within_limits(hosts: Sequence[HostSlots], max_np: int | None) -> tuple[dict[str, int], str]:
    """Return the slots to use on each host, in discovery's order, and a warning ("" if discovery keeps to the limits).

    The first line of a host counts. A larger ``max_np`` raises both limits.
    """
    most_of_host, vacancies = max(MAX_SLOTS_OF_HOST, max_np or 0), max(MAX_SLOTS, max_np or 0)
    named: dict[str, int] = {}
    for host in hosts:
        named.setdefault(host.name, max(0, host.slots))
    found: dict[str, int] = {}
    for name, slots in named.items():
        if vacancies == 0:
            break
        found[name] = min(slots, most_of_host, vacancies)
        vacancies -= max(1, found[name])
    return found, _warning(named, found)


def _warning(named: dict[str, int], found: dict[str, int]) -> str:
    cut = {name: slots for name, slots in named.items() if slots > found.get(name, 0)}
    if not cut:
        return ""
    where = f"host {next(iter(cut))}" if len(cut) == 1 else f"{len(named)} hosts"
    named_slots = sum((cut if len(cut) == 1 else named).values())
    used = sum(found.get(name, 0) for name in (cut if len(cut) == 1 else named))
    return (
        f"discovery names {named_slots} slots on {where}: the job uses the first {used} of them. "
        "A larger --max-np raises this limit."
    )
