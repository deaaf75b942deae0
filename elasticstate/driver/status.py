"""The answer to ``elasticrun status``: the world, the other workers and slots, the figures, what the job waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec import Struct

from elasticstate.core import links
from elasticstate.core.accounting import figures_of, ticks_of
from elasticstate.core.diagnostics import hosts_in_cooldown, last_heartbeat, spares, waiting_for, why_empty
from elasticstate.core.divergence import divergence_lines, suspect_lines
from elasticstate.core.figures import JobFigures
from elasticstate.core.health import no_tick_text, straggler_lines
from elasticstate.core.ids import CommitId
from elasticstate.core.sharded import replicas_of
from elasticstate.core.state import Host, Membership, Over, Running, Worker, living_members
from elasticstate.core.types import CopyFigures, ShardLayout, number_of
from elasticstate.driver.record import RecordOverview
from elasticstate.machine import format_bytes

# ---------------------------------------------------------------------------------------------------------- copy totals
# Memory and bandwidth of the kept copies of a sharded job, over all hosts, as their agents report them.


_WINDOW_S = 10.0  # over which the bandwidth is measured
_SAMPLE_S = 1.0  # between two samples


class CopyTotals:
    """Totals of a job. Only the event loop changes them, so any thread may read them. Times: the event loop's clock."""

    def __init__(self) -> None:
        self.sent_bytes = 0  # by all agents, also by those that are gone
        self.received_bytes = 0
        self._hosts: dict[str, CopyFigures] = {}
        self._samples: tuple[tuple[float, int], ...] = ()  # time, bytes sent; the oldest first

    def update(self, host: str, figures: CopyFigures, now: float) -> None:
        """Enter the report of an agent. Its counters begin at 0 when it starts."""
        before = self._hosts.get(host, CopyFigures())
        if before != figures:
            is_same = figures.sent_bytes >= before.sent_bytes and figures.received_bytes >= before.received_bytes
            since = before if is_same else CopyFigures()
            self.sent_bytes += figures.sent_bytes - since.sent_bytes
            self.received_bytes += figures.received_bytes - since.received_bytes
            self._hosts[host] = figures
        if self._hosts and (not self._samples or now >= self._samples[-1][0] + _SAMPLE_S):
            kept = [sample for sample in self._samples if sample[0] >= now - _WINDOW_S]
            self._samples = (*kept, (now, self.sent_bytes))

    def host_lost(self, host: str) -> None:
        """Count the memory of a host no more. It may return with the same agent, so its counters stay."""
        if host in self._hosts:
            self._hosts[host] = self._hosts[host]._replace(memory_bytes=0)

    def memory(self) -> dict[str, int]:
        """Return the bytes of the copies on each host that has some."""
        return {host: figures.memory_bytes for host, figures in list(self._hosts.items()) if figures.memory_bytes}

    def bytes_per_s(self, now: float) -> float:
        """Return the bytes that all hosts together have sent per second lately."""
        samples = [sample for sample in self._samples if sample[0] >= now - _WINDOW_S]
        if not samples or now - samples[0][0] < _SAMPLE_S:
            return 0.0
        return (self.sent_bytes - samples[0][1]) / (now - samples[0][0])


class ReplicationOverview(Struct, frozen=True):
    """Replication in progress of one commit."""

    commit: CommitId
    done: int  # copies that are kept
    copies: int  # all of them
    since_s: float


class ShardsOverview(Struct, frozen=True):
    """Commit line and replication of a sharded job. Ages count from when the driver received the last report."""

    line: CommitId | None  # newest commit that all members have sealed
    line_age_s: float | None
    replicated: CommitId | None  # newest commit whose replication is complete
    replicated_age_s: float | None
    replicas: int  # other hosts that keep a copy of each shard, as --replicas says
    copies: int  # kept by the agents
    replication: ReplicationOverview | None  # in progress
    trouble: str  # why the replicas are fewer or older than they should be; "": they are not
    next_attempt_s: float | None  # until the next attempt, after one that failed
    memory: dict[str, int]  # by host: bytes of the copies
    memory_bytes: int  # on all hosts
    sent_bytes: int  # from host to host so far, as this driver has heard
    received_bytes: int
    bytes_per_s: float  # sent lately by all hosts together

    def lines(self) -> Iterator[str]:
        """Yield the lines of ``elasticrun status``."""
        line = f"commit line {self.line}, {self.line_age_s:.1f} s old" if self.line else "no commit line"
        if self.replicas:
            hosts = number_of(self.replicas, "other host")
            done = f"{self.replicated}, {self.replicated_age_s:.1f} s old" if self.replicated else "no commit yet"
            yield f"{line}; replicated on {hosts}: {done}"
        else:
            yield f"{line}; no replicas"
        if (present := self.replication) is not None:
            copies = f"{present.done} of {present.copies} copies"
            yield f"  in progress for {present.since_s:.1f} s: {present.commit}, {copies}"
        if self.trouble:
            later = "" if self.next_attempt_s is None else f"; the next one begins in {self.next_attempt_s:.1f} s"
            yield f"  {self.trouble}{later}"
        if self.copies or self.memory_bytes or self.sent_bytes:
            copies = "1 copy" if self.copies == 1 else f"{self.copies} copies"
            memory = f"{format_bytes(self.memory_bytes)} of memory on {number_of(len(self.memory), 'host')}"
            sent = f"{format_bytes(round(self.bytes_per_s))}/s, {format_bytes(self.sent_bytes)} in all"
            yield f"  {copies}, {memory}; sent from host to host: {sent}"


def shards_of(m: Membership, now: float, totals: CopyTotals | None = None) -> ShardsOverview | None:
    """Return the commit line and the replication of a sharded job."""
    shards, totals = m.shards, totals or CopyTotals()
    if not shards.layouts:
        return None
    present, memory = shards.replication, totals.memory()
    return ShardsOverview(
        line=shards.line,
        line_age_s=None if shards.line is None else now - shards.line_at,
        replicated=shards.replicated,
        replicated_age_s=None if shards.replicated is None else now - shards.replicated_at,
        replicas=replicas_of(m, shards.layouts[-1]),
        copies=sum(len(host.kept) for host in m.hosts.values() if host.agent == "joined"),
        replication=None
        if present is None
        else ReplicationOverview(
            present.commit, len(present.copies) - len(present.missing), len(present.copies), now - present.since
        ),
        trouble=_trouble(m, shards.layouts[-1], now),
        next_attempt_s=shards.not_before - now if _has_failed(m, now) else None,
        memory=memory,
        memory_bytes=sum(memory.values()),
        sent_bytes=totals.sent_bytes,
        received_bytes=totals.received_bytes,
        bytes_per_s=totals.bytes_per_s(now),
    )


def _trouble(m: Membership, layout: ShardLayout, now: float) -> str:
    shards, replicas = m.shards, replicas_of(m, layout)
    if not replicas:
        return ""
    usable = [host for host in m.hosts.values() if host.agent == "joined" and host.slots and not host.draining]
    others = max(0, len(usable) - 1)
    if others < replicas:
        if not others:
            return "there is no other host to keep copies"
        return f"copies need {number_of(replicas, 'other host')}, and only {others} can keep them"
    if _has_failed(m, now):
        attempts = "attempt" if shards.failures == 1 else f"{shards.failures} attempts"
        return f"the last {attempts} to replicate failed"
    return ""


def _has_failed(m: Membership, now: float) -> bool:
    """Return True between an attempt to replicate that failed and the next one."""
    return m.shards.replication is None and m.shards.failures > 0 and m.shards.not_before > now


def status_text(
    job: str,
    m: Membership,
    figures: JobFigures,
    reason: str,
    now: float,
    outputs: Iterable[str] = (),
    durable: Iterable[str] = (),
    copies: CopyTotals | None = None,
    record: RecordOverview | None = None,
) -> str:
    """Return the status as lines of plain text.

    ``now`` is a time of the clock that ``step`` uses. ``outputs``: the outputs that cannot be written. ``durable``: the
    durable copies. ``copies``: memory and bandwidth of the copies of a sharded job. ``record``: who keeps the record.
    """

    def lines() -> Iterator[str]:
        since = "" if isinstance(m.phase, Over) else f" for {now - m.phase.since:.1f} s"
        yield f"job {job}: {m.phase_name}{since}; {no_tick_text(m, now) or reason}"
        if figures.generations:
            yield f"since the start of the job {figures.wall_s:.1f} s ago: {figures.text()}"
            yield f"time: {figures.times_text()}"
        members = [m.workers[p.worker] for p in m.world.members if p.worker in m.workers] if m.world else []
        if m.world is not None:
            hosts = len({worker.id.host for worker in members})
            living = f"{len(members)} of {number_of(m.world.size, 'worker')} alive"
            yield f"world {m.generation}: {living}, on {number_of(hosts, 'host')}"
        if (shards := shards_of(m, now, copies)) is not None:
            yield from shards.lines()
        if record is not None:
            yield record.line()
        for worker in members:
            yield f"  rank {worker.rank}  {worker.id}  {_about_worker(worker, now)}"
        in_world = {worker.id for worker in members}
        others = [worker for worker in m.workers.values() if worker.id not in in_world]
        empty = [(slot_id, slot) for slot_id, slot in m.slots.items() if slot.worker is None]
        waits = {worker.id: f"; spare: {m.policy.why_spare(len(members))}" for worker in spares(m)}
        about = [f"{worker.id}  {_about_worker(worker, now)}{waits.get(worker.id, '')}" for worker in others]
        about += [f"{slot_id}  {why_empty(slot, now)}" for slot_id, slot in empty]
        yield from _section("not in the world:", about)
        yield from _section("in cooldown:", hosts_in_cooldown(m, now))
        yield from _section("cut links:", links.lines(m, now))
        yield from _section("waiting for:", waiting_for(m, now))
        yield from _section("divergence:", [*divergence_lines(m), *suspect_lines(m, now)])
        yield from _section("stragglers:", straggler_lines(m.phase, now) if isinstance(m.phase, Running) else ())
        yield from _section("durable copies:", durable)
        yield from _section("output that cannot be written:", outputs)

    return "\n".join(lines()) + "\n"


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield the title and the lines below it; nothing if there are no lines."""
    for number, line in enumerate(lines):
        if number == 0:
            yield title
        yield f"  {line}"


def _about_worker(worker: Worker, now: float) -> str:
    if worker.draining:
        return f"drains: {worker.draining}"
    if worker.ready is not None:
        return f"ready for {now - worker.ready_at:.1f} s"
    if worker.booting:
        return f"booting for {now - worker.started_at:.1f} s"
    return f"{worker.place}, tick {worker.ticks}, {last_heartbeat(worker, now)}"


@dataclass(slots=True)
class DurableFigures:
    """Figures of the durable copies that this driver has ordered. Times: the event loop's clock."""

    saved: int = 0
    failed: int = 0
    newest: CommitId | None = None  # the commit in the newest copy
    newest_at: float | None = None  # when that copy was begun
    newest_bytes: int = 0
    unsaved: CommitId | None = None  # the last commit of the job, if it could not be saved
    trouble: str = ""  # why the last attempt failed; "" after a success

    def age_s(self, now: float) -> float | None:
        """Return the age of the newest copy; None if there is none yet."""
        return None if self.newest_at is None else now - self.newest_at

    def lines(self, now: float) -> Iterator[str]:
        """Yield the lines of ``elasticrun status``."""
        age_s = self.age_s(now)
        newest = "none yet" if age_s is None else f"the newest is {age_s:.0f} s old: commit {self.newest}"
        size = f", {format_bytes(self.newest_bytes)}" if self.newest_bytes else ""
        yield f"{newest}{size}; {self.saved} saved, {self.failed} failed"
        if self.trouble:
            yield f"the last attempt failed: {self.trouble}"


HOST_STATES = ("joined", "starting", "draining", "cooldown", "lost", "removed")
WORKER_STATES = ("booting", "ready", "member", "draining", "stopping")


class DurableOverview(Struct, frozen=True):
    """Durable copies of a job, as far as this driver has ordered them."""

    saved: int
    failed: int
    commit: CommitId | None  # in the newest copy
    age_s: float | None  # of the newest copy
    trouble: str  # why the last attempt failed; "" after a success


class Overview(Struct, frozen=True):
    """Overview of a job at one time."""

    job: str
    phase: str
    phase_s: float | None  # None: the job is over
    reason: str
    generation: int
    size: int  # of the newest world
    living: int  # of its members
    hosts: dict[str, int]  # by state
    slots: int  # of the hosts that discovery names
    workers: dict[str, int]  # by state
    ticks: int  # completed, those that were done again included
    commit: CommitId | None  # the newest
    waiting_for: tuple[str, ...]
    cut_links: tuple[str, ...]
    durable: DurableOverview | None  # None: no --durable-dir
    figures: dict[str, object]  # those of the event job_finished
    shards: ShardsOverview | None = None  # None: the job is not sharded
    record: RecordOverview | None = None  # None: no --standbys


def overview_of(
    job: str,
    m: Membership,
    reason: str,
    now: float,
    durable: DurableFigures | None = None,
    copies: CopyTotals | None = None,
    record: RecordOverview | None = None,
) -> tuple[Overview, JobFigures]:
    """Return the overview, and the figures in it. ``m`` never changes, so any thread may call this function."""
    figures = figures_of(m, now)
    hosts = Counter(host_state(host, now) for host in m.hosts.values())
    workers = Counter(worker_state(m, worker) for worker in m.workers.values())
    overview = Overview(
        job=job,
        phase=m.phase_name.partition("(")[0].lower(),
        phase_s=None if isinstance(m.phase, Over) else now - m.phase.since,
        reason=no_tick_text(m, now) or reason,
        generation=m.generation,
        size=m.world.size if m.world is not None else 0,
        living=len(living_members(m)),
        hosts={state: hosts[state] for state in HOST_STATES},
        slots=sum(host.slots for host in m.hosts.values()),
        workers={state: workers[state] for state in WORKER_STATES},
        ticks=ticks_of(m),
        commit=m.ledger.highest,
        waiting_for=waiting_for(m, now),
        cut_links=tuple(links.lines(m, now)),
        durable=_durable(m, durable or DurableFigures(), now),
        figures=dict(figures.fields()),
        shards=shards_of(m, now, copies),
        record=record,
    )
    return overview, figures


def _durable(m: Membership, figures: DurableFigures, now: float) -> DurableOverview | None:
    if m.policy.durable_dir is None:
        return None
    age_s = figures.age_s(now)
    return DurableOverview(figures.saved, figures.failed, figures.newest, age_s, figures.trouble)


def host_state(host: Host, now: float) -> str:
    if host.draining:
        return "draining"
    if not host.slots:
        return "removed"
    if host.cooldown_until > now:
        return "cooldown"
    if host.agent == "joined":
        return "joined"
    return "lost" if host.loss else "starting"


def worker_state(m: Membership, worker: Worker) -> str:
    if worker.gone:
        return "stopping"
    if worker.draining:
        return "draining"
    if worker.joined and worker.joined == m.generation:
        return "member"
    return "ready" if worker.ready is not None else "booting"
