"""Worlds that make no progress (hangs, standstills, stalled calls), and members that slow the others (stragglers).

The report of a hang is complete when all members of the ended generation have answered. A worker that holds the GIL
never does: then its end, or the next world, completes the report. See docs/decisions/hangs.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace as replace_dataclass
from itertools import pairwise
from math import inf
from operator import attrgetter
from statistics import median

from msgspec.structs import replace

from elasticstate.core import event_file, types as t
from elasticstate.core.slots import patience_s
from elasticstate.core.state import (
    Draft,
    Finishing,
    Forming,
    Membership,
    Running,
    Stall,
    Standstill,
    Stopping,
    Straggler,
    Ticking,
    Worker,
    fields_of,
    living_members,
)
from elasticstate.core.types import SHOWN, CollectivesReport, Finding, Hang, Place, listed, number_of, ranks_text
from elasticstate.core.worlds import candidates

_TICKS, _MOVED_AT = attrgetter("ticks"), attrgetter("moved_at")  # of many members at each step

DEFAULT_GROUP = "default_pg"
"""Description that torch gives to the group of all ranks."""


def compare(reports: Mapping[int, CollectivesReport], silent: tuple[int, ...] = ()) -> Finding:
    """Return the collective that not all ranks have entered. Of several groups, the one that most ranks wait in.

    Without such a collective, and with ``silent`` ranks, it is the last one that the others have entered. If ranks have
    entered different operations under one number, that is the reason.
    """
    return replace_dataclass(_not_entered_by_all(reports, silent), mixture=_mixture(reports))


def _not_entered_by_all(reports: Mapping[int, CollectivesReport], silent: tuple[int, ...]) -> Finding:
    found = [_in_group(group, reports, silent) for group in sorted(_groups(reports))]
    unequal = [finding for finding in found if finding.missing or (finding.silent and finding.entered)]
    if not unequal:
        return Finding(None, (), (), silent)
    return max(unequal, key=lambda finding: (bool(finding.missing), len(finding.entered)))


def _mixture(reports: Mapping[int, CollectivesReport]) -> str:
    """Return the first collective that is another operation on some ranks, as a clause; "" if there is none."""
    for group in sorted(_groups(reports)):
        ranks: dict[int, dict[str, list[int]]] = {}
        for rank, report in sorted(reports.items()):
            for each in report.collectives:
                if each.group == group:
                    ranks.setdefault(each.number, {}).setdefault(each.text.partition("(")[0], []).append(rank)
        for number, operations in sorted(ranks.items()):
            if len(operations) > 1:
                parts = [f"{operation} on {ranks_text(those)}" for operation, those in operations.items()]
                return f"collective {number} of {group} is {' and '.join(parts)}"
    return ""


def _groups(reports: Mapping[int, CollectivesReport]) -> set[str]:
    return {collective.group for report in reports.values() for collective in report.collectives}


def _in_group(group: str, reports: Mapping[int, CollectivesReport], silent: tuple[int, ...]) -> Finding:
    """Compare the ranks that have used a group. Who has not used it may be no member."""
    entered = {
        rank: {each.number: each for each in report.collectives if each.group == group}
        for rank, report in reports.items()
    }
    last = {rank: max(numbers, default=0) for rank, numbers in entered.items()}
    members = [rank for rank in sorted(last) if last[rank] or group == DEFAULT_GROUP]
    least, most = min(last[rank] for rank in members), max(last[rank] for rank in members)
    number = least + 1 if least < most else most
    collective = next((entered[rank][number] for rank in members if number in entered[rank]), None)
    inside = tuple(rank for rank in members if last[rank] >= number)
    return Finding(collective, inside, tuple(rank for rank in members if last[rank] < number), silent)


def begin_hang(d: Draft, members: list[Worker]) -> None:
    """Await the reports of the members of the present generation, which has ended because it hangs."""
    ranks = {str(worker.id): worker.rank for worker in members if worker.rank is not None}
    d.update_ledger(hang=Hang(d.generation, ranks, {}))


def collectives_reported(d: Draft, worker: Worker, report: CollectivesReport) -> None:
    """Record the report of a member. Report the hang when it is the last one."""
    hang = d.ledger.hang
    if hang is None or hang.found is not None or hang.generation != report.generation:
        return
    rank = hang.ranks.get(str(worker.id))
    if rank is None:
        return
    hang = replace(hang, reports={**hang.reports, rank: report})
    d.update_ledger(hang=hang)
    if len(hang.reports) == len(hang.ranks):
        report_hang(d)


def report_hang(d: Draft) -> None:
    """Report the hang, with the reports that have arrived, unless that is done or there is none."""
    hang = d.ledger.hang
    if hang is None or hang.found is not None:
        return
    silent = tuple(sorted(set(hang.ranks.values()) - set(hang.reports)))
    found = compare(hang.reports, silent) if hang.reports else Finding(None, (), (), silent)
    d.update_ledger(hang=replace(hang, found=found))
    d.note(
        event_file.Hang,
        ended=hang.generation,
        **_call_of(found.collective),
        entered=list(found.entered),
        missing=list(found.missing),
        silent=list(found.silent),
        lines={str(rank): hang.reports[rank].line for rank in found.missing},
        stacks={str(rank): hang.reports[rank].stack for rank in found.missing},
        text=found.text(),
    )


def _call_of(found: t.Collective | None) -> event_file.CallFields:
    if found is None:
        return {"call": None, "group": None, "number": None}
    return {"call": found.text, "group": found.group, "number": found.number}


def reports_until(d: Draft, since: float) -> float:
    """Return the time until which READY members may report the hang that has ended their generation at ``since``; -inf
    if no report is awaited.

    A member that was freed before its END arrived is READY before it reports.
    """
    hang = d.ledger.hang
    if hang is None or hang.found is not None or hang.generation != d.generation:
        return -inf
    is_awaited = any(member.ready is not None and member.rank not in hang.reports for member in d.members())
    return since + d.policy.failure_grace_s if is_awaited else -inf


def hang_text(d: Draft, worker: Worker) -> str:
    """Return what the hang of the worker's generation was, as a clause for its root cause; "" without one."""
    hang = d.ledger.hang
    if hang is None or hang.found is None or str(worker.id) not in hang.ranks:
        return ""
    return f"; {hang.found.text()}"


# ----------------------------------------------------------------------------------------------------------- standstill
# Standstills: no member of a world has completed a tick for far longer than usual. The core cannot know if a step is
# only long, so it ends nothing: it asks all members where they are, and reports their answers once. The time of a
# standstill is no goodput, unless its tick is completed after all. A call of ``state.progress()`` counts like a tick.
#
# The limit is ``policy.no_tick_notice_s``, or ``_USUAL`` times the median of the last ticks if these are long.


ANSWER_S = 2.0  # seconds for the members to answer where they are
_USUAL = 20
_KEPT = 15  # times of ticks
_SHOWN = 8  # different lines of code


def _where_text(found: Finding, reports: Mapping[int, CollectivesReport]) -> str:
    """Return ``rank 0 is at train.py:14 in train; ranks 1, 2 are at ...``, and the collective if there is one."""
    ranks: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks.setdefault(report.line or "an unknown line", []).append(rank)
    parts = [
        f"{ranks_text(those)} {'is' if len(those) == 1 else 'are'} at {line}"
        for line, those in list(ranks.items())[:_SHOWN]
    ]
    if found.silent:
        parts.append(f"no answer from {ranks_text(found.silent)} (stopped, or in code that holds the GIL)")
    if found.mixture or (found.collective is not None and found.missing):
        parts.append(replace_dataclass(found, silent=()).text())
    return "; ".join(parts)


def check_ticks(d: Draft, members: Sequence[Worker]) -> None:
    """Record completed ticks. Report a standstill that has begun or ended. Call it while members may complete ticks."""
    if not members:
        return
    ticking = d.ledger.ticking
    completed = max(map(_TICKS, members))
    if completed > ticking.completed:
        ticking = _ticked(ticking, completed, d.now)
    moved_at, standstill = max(map(_MOVED_AT, members)), ticking.standstill
    if standstill is not None and moved_at > standstill.since:
        has_ticked = any(member.ticks_at > standstill.asked_at for member in members)  # perhaps one that was behind
        reason = "ticks go on" if has_ticked else "the script reports progress"
        _end(d, standstill, reason, goes_on=True)
        ticking = replace(ticking, standstill=None)
    elif standstill is None and _stands_still(d, ticking, members, moved_at):
        ticking = replace(ticking, standstill=Standstill(moved_at, completed, d.now))
        d.effects.append(t.AskWhere(d.generation))
        d.update_ledger(account=d.ledger.account.with_standstill(d.now - ticking.at, d.now))
    elif standstill is not None and not standstill.text and d.now >= standstill.asked_at + ANSWER_S:
        ticking = replace(ticking, standstill=_report(d, standstill, members))
    if ticking.standstill is not None:
        d.reason = "no member completes a tick"
    if ticking is not d.ledger.ticking:
        d.update_ledger(ticking=ticking)


def standstill_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the time until which the members may answer. A standstill itself is found with the members' reports."""
    standstill = d.ledger.ticking.standstill
    if standstill is not None and not standstill.text:
        yield "where", standstill.asked_at + ANSWER_S


def where_reported(d: Draft, worker: Worker, report: CollectivesReport) -> None:
    """Record the answer of a member. The last answer completes the report."""
    standstill = d.ledger.ticking.standstill
    if standstill is None or standstill.text or worker.rank is None or report.generation != d.generation:
        return
    standstill = replace(standstill, reports={**standstill.reports, worker.rank: report})
    members = d.members()
    if all(member.rank in standstill.reports for member in members):
        standstill = _report(d, standstill, members)
    d.update_ledger(ticking=replace(d.ledger.ticking, standstill=standstill))


def end_standstill(d: Draft) -> None:
    """Report the end of a standstill if the members are not in training any more."""
    ticking = d.ledger.ticking
    if ticking.standstill is None:
        return
    match d.phase:
        case Running(gate_since=None) | Forming(at_tick=int(), clock=None):
            return
        case Running() | Finishing():
            reason = "the exit gate was entered"
        case Stopping():
            reason = "the job is stopped"
        case _:
            reason = f"generation {d.generation} has ended"
    _end(d, ticking.standstill, reason, goes_on=False)
    d.update_ledger(ticking=replace(ticking, standstill=None))


def standstill_line(m: Draft | Membership, now: float) -> str:
    """Return ``no tick for 65 s``, with the places of the ranks as far as they are known; "" without a standstill."""
    standstill = m.ledger.ticking.standstill
    if standstill is None or not isinstance(m.phase, Running | Forming):
        return ""
    where = f": {standstill.text}" if standstill.text else ""
    return f"{no_tick_text(m, now)}{where}"


def no_tick_text(m: Draft | Membership, now: float) -> str:
    """Return ``no tick for 65 s``; "" without a standstill."""
    standstill = m.ledger.ticking.standstill
    if standstill is None or not isinstance(m.phase, Running | Forming):
        return ""
    return f"no tick for {max(0.0, now - standstill.since):.0f} s"


def _ticked(ticking: Ticking, completed: int, now: float) -> Ticking:
    """Record completed ticks. The first tick of a world may compile, so its time is not that of a usual tick."""
    times = ticking.times
    if ticking.completed:
        times = (*times, (now - ticking.at) / (completed - ticking.completed))[-_KEPT:]
    return replace(ticking, completed=completed, at=now, times=times)


def _stands_still(d: Draft, ticking: Ticking, members: Sequence[Worker], moved_at: float) -> bool:
    """Return True if no member has moved for the limit, up to the last report, and an agent has seen that.

    Only reports count, because the driver may have been stopped for a while.
    """
    limit_s = d.policy.no_tick_notice_s
    if d.now - moved_at < limit_s:  # of a thousand workers: this is all
        return False
    seconds = max(member.reported_at for member in members) - moved_at
    if seconds < limit_s:
        return False
    limit_s = max(limit_s, _USUAL * median(ticking.times)) if ticking.times else limit_s
    is_due = seconds >= limit_s and any(member.still_s >= limit_s for member in members)
    return is_due and all(member.place == Place.TRAIN for member in members)


def _report(d: Draft, standstill: Standstill, members: Sequence[Worker]) -> Standstill:
    """Report the standstill with the answers that have arrived."""
    reports = standstill.reports
    silent = tuple(sorted(m.rank for m in members if m.rank is not None and m.rank not in reports))
    found = compare(reports, silent) if reports else Finding(None, (), (), silent)
    call = found.collective if found.missing else None
    shown = {rank for rank in reports if rank in found.missing}
    shown.update({report.line: rank for rank, report in sorted(reports.items(), reverse=True)}.values())
    text = _where_text(found, reports)
    d.note(
        event_file.NoTick,
        seconds=round(d.now - standstill.since, 3),
        ticks=standstill.ticks,
        **_call_of(call),
        entered=list(found.entered) if call is not None else [],
        missing=list(found.missing) if call is not None else [],
        silent=list(silent),
        lines={str(rank): report.line for rank, report in sorted(reports.items())},
        stacks={str(rank): reports[rank].stack for rank in sorted(shown)[: 2 * _SHOWN]},
        text=f"{_since_text(d, standstill)}: {text}. {_advice(d)}",
    )
    return replace(standstill, text=text, reports={})


def _since_text(d: Draft, standstill: Standstill) -> str:
    seconds = f"{d.now - standstill.since:.0f} s"
    if standstill.ticks:
        return f"no tick for {seconds}, after {number_of(standstill.ticks, 'tick')} of generation {d.generation}"
    return f"no tick for {seconds}, since generation {d.generation} began to train"


def _advice(d: Draft) -> str:
    if d.ledger.has_ticked:
        return "The job goes on. Only --hang-timeout, which is off by default, ends a generation that hangs."
    return (
        "The first step may take long. But a loop that calls neither commit() nor check_host_updates() makes no ticks: "
        "a failure then loses all of its work, and no worker can join or leave."
    )


def _end(d: Draft, standstill: Standstill, reason: str, goes_on: bool) -> None:
    """Report the end of a standstill. If training goes on, the time of its tick is goodput."""
    if goes_on:
        d.update_ledger(account=d.ledger.account.with_completed_tick(d.now))
    if standstill.text:
        d.note(event_file.NoTickEnded, seconds=round(d.now - standstill.since, 3), goes_on=goes_on, reason=reason)


# --------------------------------------------------------------------------------------------------------------- stalls
# The stall check: reports calls in which some ranks wait for too long, and ends the job if a stall lasts longer. A
# worker's first report of a long wait does not say which other ranks wait: they may have waited for less time, and
# then nothing has reached the driver. So the core first requests the newest calls of all members, and reports the stall
# when the answers have arrived.


CALLS_ANSWER_S = 1.0  # seconds for the agents to answer the request for all calls
_CALL_ENDED = "the call has ended"

Call = tuple[int, int]  # process set, number


def waiting_in_calls(members: list[Worker]) -> dict[Call, list[Worker]]:
    """Return the members that wait in each call, by rank."""
    found: dict[Call, list[Worker]] = {}
    for worker in members:
        if worker.call is not None and worker.waits_since < inf:
            found.setdefault((worker.call.process_set, worker.call.number), []).append(worker)
    return found


def _since(inside: list[Worker]) -> float:
    """Return the time since which the first of these workers waits."""
    return min(worker.waits_since for worker in inside)


def absent(inside: list[Worker], members: list[Worker]) -> list[Worker]:
    """Return the members that must make the call in which those ``inside`` wait, and have not made it."""
    if not inside:
        return []
    assert inside[0].call is not None
    ranks, waiting_ranks = set(inside[0].call.ranks), {worker.rank for worker in inside}
    return [w for w in members if w.rank not in waiting_ranks and (not ranks or w.rank in ranks)]


def _text_of(inside: list[Worker]) -> str:
    """Return the text of the call. A rank in ``join()`` waits for the call of the others."""
    texts = [worker.call.call for worker in inside if worker.call is not None]
    return next((text for text in texts if text != "join()"), "join()")


def absent_text(workers: list[Worker]) -> str:
    """Return ``a:1#1 (rank 1): last call barrier()``, with the rest of the first sixteen workers."""
    return listed((f"{w.id} (rank {w.rank}): {_where(w)}" for w in workers[:SHOWN]), count=len(workers))


def _where(worker: Worker) -> str:
    if worker.in_gate:
        return "in the exit gate"
    if worker.call is None:
        return "no call in this world reported"
    return f"waits in {worker.call.call}" if worker.waits_since < inf else f"last call {worker.call.call}"


def stall_lines(m: Draft | Membership, phase: Running, now: float) -> Iterator[str]:
    """Yield one line for each stall: the missing workers, the call, and the ranks that wait."""
    if not phase.stalls:
        return
    members = living_members(m)
    groups = waiting_in_calls(members)
    for stall in phase.stalls:
        inside = groups.get(stall.call, [])
        missing = absent(inside, members)
        if missing:
            ranks = ranks_text([worker.rank for worker in inside])
            lasted = f"stall for {now - stall.since:.1f} s"
            yield f"{lasted}: {ranks} in {stall.text}; missing: {absent_text(missing)}"


def call_reported(d: Draft, worker: Worker, report: t.CallReport) -> None:
    """Record the newest call of a member of the present world."""
    if not isinstance(d.phase, Running):
        return
    waits_since = inf if report.waiting_s is None else d.now - max(0.0, report.waiting_s)
    d.put(worker, call=report, waits_since=waits_since, reported_at=d.now)
    if not d.phase.has_calls:
        d.phase = replace_dataclass(d.phase, has_calls=True)


def check_stalls(d: Draft, phase: Running, members: list[Worker]) -> Running:
    """Report stalls that have begun or ended. Return the phase with the present stalls."""
    if not phase.has_calls:
        return phase
    groups = waiting_in_calls(members)
    known = tuple(stall for stall in phase.stalls if stall.call in groups)
    for stall in phase.stalls:
        if stall not in known:
            note_stall_end(d, stall, _CALL_ENDED)
    due = [inside for call, inside in _unreported(d, groups, known, members) if d.now >= _due_at(d, inside)]
    watched_since = phase.watched_since
    if due and watched_since is None:
        d.effects.append(t.WatchCalls(d.generation, True))
        watched_since = d.now
    elif due and watched_since is not None and d.now >= watched_since + CALLS_ANSWER_S:
        known = (*known, *(_begin_stall(d, inside, members) for inside in due))
    elif not due and not known and watched_since is not None:
        d.effects.append(t.WatchCalls(d.generation, False))
        watched_since = None
    changed = replace_dataclass(phase, stalls=known, watched_since=watched_since)
    return phase if changed == phase else changed


def stall_deadlines(d: Draft, phase: Running, members: list[Worker]) -> Iterator[tuple[str, float]]:
    """Yield the times at which a stall must be reported, or ends the job."""
    if not phase.has_calls:
        return
    groups = waiting_in_calls(members)
    due_at = min((_due_at(d, inside) for _, inside in _unreported(d, groups, phase.stalls, members)), default=inf)
    yield "stall check", due_at if phase.watched_since is None else max(due_at, phase.watched_since + CALLS_ANSWER_S)
    yield "stall shutdown", min((_shutdown_at(d, stall) for stall in phase.stalls), default=inf)


def overdue_stall(d: Draft, phase: Running) -> Stall | None:
    """Return a stall that has lasted for --stall-shutdown-time."""
    return next((stall for stall in phase.stalls if d.now >= _shutdown_at(d, stall)), None)


def end_stalls(d: Draft, phase: Running) -> None:
    """Report the end of all stalls: ``phase`` has ended."""
    reason = _CALL_ENDED if isinstance(d.phase, Finishing) else f"generation {d.generation} has ended"
    for stall in phase.stalls:
        note_stall_end(d, stall, reason)


def _unreported(
    d: Draft, groups: dict[Call, list[Worker]], known: tuple[Stall, ...], members: list[Worker]
) -> Iterator[tuple[Call, list[Worker]]]:
    """Yield the calls with missing ranks, and the members that wait there, unless the stall is reported already."""
    reported = {stall.call for stall in known}
    for call, inside in groups.items():
        if call not in reported and absent(inside, members):
            yield call, inside


def _due_at(d: Draft, inside: list[Worker]) -> float:
    limit_s = d.policy.stall_check_s
    return inf if limit_s is None else _since(inside) + limit_s


def _shutdown_at(d: Draft, stall: Stall) -> float:
    limit_s = d.policy.stall_shutdown_s
    return inf if limit_s is None else stall.since + limit_s


def _begin_stall(d: Draft, inside: list[Worker], members: list[Worker]) -> Stall:
    """Report a stall, and return it."""
    assert inside[0].call is not None
    missing = absent(inside, members)
    stall = Stall((inside[0].call.process_set, inside[0].call.number), _text_of(inside), _since(inside))
    d.note(
        event_file.Stall,
        call=stall.text,
        seconds=round(d.now - stall.since, 3),
        waiting=[worker.rank or 0 for worker in inside],
        missing=[worker.rank or 0 for worker in missing],
        who=absent_text(missing),
    )
    return stall


def note_stall_end(d: Draft, stall: Stall, reason: str) -> None:
    d.note(event_file.StallEnded, call=stall.text, seconds=round(d.now - stall.since, 3), reason=reason)


# ----------------------------------------------------------------------------------------------------------- stragglers
# Stragglers: members whose own time per tick, without waits in collectives, is persistently longer than the others'.
# The rule is in docs/decisions/stragglers.md. The median of the others is the upper one, so that in a small world a
# rank must be slower than more than half of the others.

WINDOW = 10
"""Number of ranges that are compared. A range is one tick, unless ticks are short (see native/pace.hpp)."""
_EXCEPTIONS = 1  # ranges in which a straggler may be as fast as the others
_KEPT_POINTS = 4 * WINDOW  # points per worker, because ranks may report different ticks


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
        d.put(worker, pace=(*worker.pace, *points)[-_KEPT_POINTS:])
        if not d.phase.has_pace:
            d.phase = replace_dataclass(d.phase, has_pace=True)


def check_pace(d: Draft, phase: Running, members: list[Worker]) -> Running:
    """Report stragglers that have begun or recovered, and drain one. Return the phase with the present stragglers."""
    if not phase.has_pace or len(members) < 2:
        return phase
    newest = min(worker.pace[-1][0] if worker.pace else 0 for worker in members)
    if newest <= phase.paced:
        return phase
    phase = replace_dataclass(phase, paced=newest)
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
    return replace_dataclass(phase, stragglers=tuple(stragglers))


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
            yield replace_dataclass(straggler, factor=factor)


def end_stragglers(d: Draft, phase: Running) -> None:
    """Report the end of all stragglers: ``phase`` has ended."""
    is_over = isinstance(d.phase, Finishing)
    reason = "the training has ended" if is_over else f"generation {d.generation} has ended"
    for straggler in phase.stragglers:
        _note_end(d, straggler, reason)


def _name(d: Draft, worker: Worker, factor: float, ticks: int) -> Straggler:
    """Report a straggler, and return it."""
    rank = worker.rank or 0
    d.note(event_file.Straggler, **fields_of(worker.id), rank=rank, factor=round(factor, 3), ticks=ticks)
    return Straggler(worker.id, rank, d.now, factor)


def _note_end(d: Draft, straggler: Straggler, reason: str) -> None:
    who, seconds = fields_of(straggler.worker), round(d.now - straggler.since, 3)
    d.note(event_file.StragglerEnded, **who, rank=straggler.rank, seconds=seconds, reason=reason)


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
    return [f"{straggler.text()}, for {now - straggler.since:.1f} s" for straggler in phase.stragglers]
