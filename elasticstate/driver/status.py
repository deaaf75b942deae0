"""The answer to ``elasticrun status``: the world, the other workers and slots, the figures, what the job waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elasticstate.core.diagnostics import hosts_in_cooldown, last_heartbeat, why_empty
from elasticstate.core.figures import JobFigures
from elasticstate.core.membership import Membership, waiting_for
from elasticstate.core.records import Over, Running, Worker
from elasticstate.core.standstill import no_tick_text
from elasticstate.core.stragglers import straggler_lines
from elasticstate.core.texts import number_of
from elasticstate.driver.copy_totals import CopyTotals
from elasticstate.driver.shards_overview import shards_of


def status_text(
    job: str,
    m: Membership,
    figures: JobFigures,
    reason: str,
    now: float,
    outputs: Iterable[str] = (),
    durable: Iterable[str] = (),
    copies: CopyTotals | None = None,
) -> str:
    """Return the status as lines of plain text.

    ``now`` is a time of the clock that ``step`` uses. ``outputs``: the outputs that cannot be written. ``durable``: the
    durable copies. ``copies``: memory and bandwidth of the copies of a sharded job.
    """
    return "\n".join(_lines(job, m, figures, reason, now, outputs, durable, copies)) + "\n"


def _lines(
    job: str,
    m: Membership,
    figures: JobFigures,
    reason: str,
    now: float,
    outputs: Iterable[str],
    durable: Iterable[str],
    copies: CopyTotals | None,
) -> Iterator[str]:
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
    for worker in members:
        yield f"  rank {worker.rank}  {worker.id}  {_about_worker(worker, now)}"
    in_world = {worker.id for worker in members}
    others = [worker for worker in m.workers.values() if worker.id not in in_world]
    empty = [(slot_id, slot) for slot_id, slot in m.slots.items() if slot.worker is None]
    about = [f"{worker.id}  {_about_worker(worker, now)}" for worker in others]
    about += [f"{slot_id}  {why_empty(slot, now)}" for slot_id, slot in empty]
    yield from _section("not in the world:", about)
    yield from _section("in cooldown:", hosts_in_cooldown(m, now))
    yield from _section("waiting for:", waiting_for(m, now))
    yield from _section("stragglers:", straggler_lines(m.phase, now) if isinstance(m.phase, Running) else ())
    yield from _section("durable copies:", durable)
    yield from _section("output that cannot be written:", outputs)


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
