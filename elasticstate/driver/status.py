"""The answer to ``elasticrun status``: the world, its missing workers, why the job waits, and since when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elasticstate.core.diagnostics import failed_times, left_alone
from elasticstate.core.membership import Membership, waiting_for
from elasticstate.core.records import Over, Slot, Worker
from elasticstate.driver.report import number_of


def status_text(job: str, m: Membership, reason: str, now: float, outputs: Iterable[str] = ()) -> str:
    """Return the status as lines of plain text.

    ``now`` is a time of the clock that ``step`` uses. ``outputs``: the outputs that cannot be written.
    """
    return "\n".join([*_lines(job, m, reason, now), *_outputs(outputs)]) + "\n"


def _outputs(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number == 0:
            yield "output that is not written:"
        yield f"  {line}"


def _lines(job: str, m: Membership, reason: str, now: float) -> Iterator[str]:
    since = "" if isinstance(m.phase, Over) else f" for {now - m.phase.since:.1f} s"
    yield f"job {job}: {m.phase_name}{since}; {reason}"
    members = [m.workers[p.worker] for p in m.world.members if p.worker in m.workers] if m.world else []
    if m.world is not None:
        hosts = len({worker.id.host for worker in members})
        living = f"{len(members)} of {number_of(m.world.size, 'worker')} alive"
        yield f"world {m.generation}: {living}, on {number_of(hosts, 'host')}"
    for worker in members:
        yield f"  rank {worker.rank}  {worker.id}  {_doing(worker, now)}"
    seated = {worker.id for worker in members}
    others = [worker for worker in m.workers.values() if worker.id not in seated]
    empty = [(slot_id, slot) for slot_id, slot in m.slots.items() if slot.worker is None]
    if others or empty:
        yield "not in the world:"
    for worker in others:
        yield f"  {worker.id}  {_doing(worker, now)}"
    for slot_id, slot in empty:
        yield f"  {slot_id}  {_why_empty(slot, now)}"
    cooling = list(left_alone(m, now))
    if cooling:
        yield "left alone:"
    for line in cooling:
        yield f"  {line}"
    waiting = waiting_for(m, now)
    if waiting:
        yield "waits for:"
    for line in waiting:
        yield f"  {line}"


def _doing(worker: Worker, now: float) -> str:
    if worker.draining:
        return f"leaves: {worker.draining}"
    if worker.ready is not None:
        return f"ready for {now - worker.ready_at:.1f} s"
    if worker.booting:
        return f"boots for {now - worker.started_at:.1f} s"
    heard = f", last heard {now - worker.heard_at:.1f} s ago" if worker.heard_at > 0 else ""
    return f"{worker.place}, tick {worker.ticks}{heard}"


def _why_empty(slot: Slot, now: float) -> str:
    if slot.finished:
        return "has finished"
    if slot.failure is None:
        return "empty"
    again = f", starts again in {slot.not_before - now:.1f} s" if slot.not_before > now else ""
    return f"{failed_times(slot)}: {slot.failure.reason}{again}"
