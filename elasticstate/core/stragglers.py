"""Stragglers: members whose own time per tick is persistently longer than the others'.

All ranks have equally long ticks, because each waits for the slowest one in the collectives. So the *own time* of a
rank, the time without these waits, is compared, over ranges of ticks that are the same for all ranks. A member is a
straggler if its own time exceeds the median of the others' by the threshold

- in the sum of the last ``WINDOW`` ranges, and
- by half of that in each of these ranges, except one: ranks that are slow in turn, and single long ticks, do not count.

The median of the others is the upper one, so that in a small world a rank must be slower than more than half of the
others. A straggler has recovered when the sum of a window exceeds the median by less than half of the threshold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elasticstate.core import event_file
from elasticstate.core.slots import patience_s
from elasticstate.core.state import Draft, Finishing, Running, Straggler, Worker
from elasticstate.core.worlds import candidates

WINDOW = 10
"""Number of ranges that are compared. A range is one tick, unless ticks are short (see native/pace.hpp)."""
_EXCEPTIONS = 1  # ranges in which a straggler may be as fast as the others
_KEPT = 4 * WINDOW  # points per worker, because ranks may report different ticks


@dataclass(frozen=True, slots=True)
class Window:
    """Own times of all members, by rank, in the same ranges of ticks. ``own[i][r]``: range i, member r."""

    ticks: int  # in all ranges
    own: tuple[tuple[int, ...], ...]

    def factors(self) -> list[float]:
        """Return the factor of each member over the whole window."""
        return factors([sum(times) for times in zip(*self.own, strict=True)])


def window_of(paces: Sequence[tuple[tuple[int, int], ...]]) -> Window | None:
    """Return the newest window of these members; None: too few ticks that all of them have reported."""
    common = set.intersection(*({tick for tick, _ in pace} for pace in paces))
    if len(common) <= WINDOW:
        return None
    ticks = sorted(common)[-WINDOW - 1 :]
    times = [dict(pace) for pace in paces]
    at = [tuple(own[tick] for own in times) for tick in ticks]
    own = tuple(tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(at))
    return Window(ticks[-1] - ticks[0], own)


def factors(own: Sequence[int]) -> list[float]:
    """Return the own time of each member, divided by the upper median of the others'. At least two members."""
    order = sorted(own)
    middle = (len(own) - 1) // 2  # among the others
    found = []
    for mine in own:
        others = order[middle + 1] if bisect_left(order, mine) <= middle else order[middle]
        found.append(mine / max(others, 1))
    return found


def slow_members(window: Window, threshold: float) -> list[tuple[int, float]]:
    """Return the stragglers of a window, each with the factor of its own time."""
    slow = [(member, factor) for member, factor in enumerate(window.factors()) if factor >= 1 + threshold]
    if not slow:
        return []
    each = [factors(times) for times in window.own]
    limit = 1 + threshold / 2
    return [
        (member, factor) for member, factor in slow if sum(of_range[member] < limit for of_range in each) <= _EXCEPTIONS
    ]


def pace_reported(d: Draft, worker: Worker, points: tuple[tuple[int, int], ...]) -> None:
    """Record the own time of a member of the present world."""
    if isinstance(d.phase, Running):
        d.put(worker, pace=(*worker.pace, *points)[-_KEPT:])
        if not d.phase.has_pace:
            d.phase = replace(d.phase, has_pace=True)


def check_pace(d: Draft, phase: Running, members: list[Worker]) -> Running:
    """Report stragglers that have begun or recovered, and drain one. Return the phase with the present stragglers."""
    if not phase.has_pace or len(members) < 2:
        return phase
    newest = min(worker.pace[-1][0] if worker.pace else 0 for worker in members)
    if newest <= phase.paced:
        return phase
    phase = replace(phase, paced=newest)
    window = window_of([worker.pace for worker in members])
    if window is None:
        return phase
    threshold = d.policy.straggler_threshold
    stragglers = [*_not_recovered(d, phase, members, window, threshold)]
    known = {straggler.worker for straggler in stragglers}
    for index, factor in slow_members(window, threshold):
        if members[index].id not in known:
            stragglers.append(_name(d, members[index], factor, window.ticks))
    if d.policy.straggler_action == "drain" and stragglers:
        _drain_one(d, stragglers, members)
    return replace(phase, stragglers=tuple(stragglers))


def _not_recovered(
    d: Draft, phase: Running, members: list[Worker], window: Window, threshold: float
) -> Iterator[Straggler]:
    """Yield the known stragglers that still are slow. Report the end of the others."""
    now = {worker.id: factor for worker, factor in zip(members, window.factors(), strict=True)}
    for straggler in phase.stragglers:
        factor = now.get(straggler.worker, 0.0)
        if factor < 1 + threshold / 2:
            _note_end(d, straggler, "recovered")
        else:
            yield replace(straggler, factor=factor)


def end_stragglers(d: Draft, phase: Running) -> None:
    """Report the end of all stragglers: ``phase`` has ended."""
    is_over = isinstance(d.phase, Finishing)
    reason = "the training has ended" if is_over else f"generation {d.generation} has ended"
    for straggler in phase.stragglers:
        _note_end(d, straggler, reason)


def _name(d: Draft, worker: Worker, factor: float, ticks: int) -> Straggler:
    """Report a straggler, and return it."""
    rank = worker.rank or 0
    d.note(
        event_file.Straggler,
        worker=str(worker.id),
        host=worker.id.host,
        slot=worker.id.slot,
        rank=rank,
        factor=round(factor, 3),
        ticks=ticks,
    )
    return Straggler(worker.id, rank, d.now, factor)


def _note_end(d: Draft, straggler: Straggler, reason: str) -> None:
    host, slot = straggler.worker.slot_id
    seconds = round(d.now - straggler.since, 3)
    d.note(
        event_file.StragglerEnded,
        worker=str(straggler.worker),
        host=host,
        slot=slot,
        rank=straggler.rank,
        seconds=seconds,
        reason=reason,
    )


def _drain_one(d: Draft, stragglers: list[Straggler], members: list[Worker]) -> None:
    """Drain the slowest straggler, unless a member drains already, or too few workers would stay.

    Its slot stays empty for the longest of --cooldown-range, which gives way as a backoff does.
    """
    if d.draining or len(members) - 1 + len(candidates(d)) < d.policy.min_np:
        return
    slowest = max(stragglers, key=lambda straggler: (straggler.factor, straggler.worker))
    worker = d.workers[slowest.worker]
    reason = f"straggler: {slowest.factor:.2f} times the own time of the others"
    d.put(worker, draining=reason, draining_since=d.now)
    d.put_slot(
        worker.id.slot_id,
        not_before=d.now + d.policy.preemption_cooldown_s,
        gives_way_at=d.now + patience_s(1, d.time_to_give_up_s()),
    )


def straggler_lines(phase: Running, now: float) -> list[str]:
    """Return one line for each straggler, for the status."""
    return [
        f"{s.worker} (rank {s.rank}): {s.factor:.2f} times the own time of the others, for {now - s.since:.1f} s"
        for s in phase.stragglers
    ]
