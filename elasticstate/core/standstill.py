"""Standstills: no member of a world has completed a tick for far longer than usual.

A hung collective, a deadlock or a stuck file system stops all members alike, without an error. The core cannot know if
a step is only long, so it ends nothing. It asks all members where they are, and reports their answers once; it reports
again when ticks go on. The time of a standstill is no goodput, unless its tick is completed after all.

The limit is ``policy.no_tick_notice_s``, or ``_USUAL`` times the median of the last ticks if these are long. A call of
``state.progress()`` counts like a tick here. In the exit gate members make no ticks: the phase has a notice of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replace_dataclass
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from elasticstate.core import types as t
from elasticstate.core.collectives import CollectivesReport, Finding
from elasticstate.core.hangs import compare
from elasticstate.core.phases import Finishing, Forming, Running, Stopping
from elasticstate.core.records import Draft, Membership, Worker
from elasticstate.core.texts import number_of, ranks_text
from elasticstate.core.ticking import Standstill, Ticking

ANSWER_S = 2.0  # seconds for the members to answer where they are
_USUAL = 20
_KEPT = 15  # times of ticks
_SHOWN = 8  # different lines of code


class Where(Struct, frozen=True):
    """The answers of the members of a standstill."""

    found: Finding
    lines: Mapping[int, str]  # by rank: the line of code of the main thread

    def text(self) -> str:
        """Return ``rank 0 is at train.py:14 in train; ranks 1, 2 are at ...``, and the collective if there is one."""
        ranks: dict[str, list[int]] = {}
        for rank, line in sorted(self.lines.items()):
            ranks.setdefault(line or "an unknown line", []).append(rank)
        parts = [
            f"{ranks_text(those)} {'is' if len(those) == 1 else 'are'} at {line}"
            for line, those in list(ranks.items())[:_SHOWN]
        ]
        if self.found.silent:
            parts.append(f"no answer from {ranks_text(self.found.silent)} (stopped, or in code that holds the GIL)")
        if self.found.mixture or (self.found.collective is not None and self.found.missing):
            parts.append(replace_dataclass(self.found, silent=()).text())
        return "; ".join(parts)


def check_ticks(d: Draft, members: Sequence[Worker]) -> None:
    """Record completed ticks. Report a standstill that has begun or ended. Call it while members may complete ticks."""
    if not members:
        return
    ticking = d.ledger.ticking
    completed = max(member.ticks for member in members)
    if completed > ticking.completed:
        ticking = _ticked(ticking, completed, d.now)
    moved_at, standstill = max(member.moved_at for member in members), ticking.standstill
    if standstill is not None and moved_at > standstill.since:
        reason = "ticks go on" if completed > standstill.ticks else "the script reports progress"
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
    seconds, limit_s = max(member.reported_at for member in members) - moved_at, d.policy.no_tick_notice_s
    if seconds < limit_s:
        return False
    limit_s = max(limit_s, _USUAL * median(ticking.times)) if ticking.times else limit_s
    is_due = seconds >= limit_s and any(member.still_s >= limit_s for member in members)
    return is_due and all(member.place == "train" for member in members)


def _report(d: Draft, standstill: Standstill, members: Sequence[Worker]) -> Standstill:
    """Report the standstill with the answers that have arrived."""
    reports = standstill.reports
    silent = tuple(sorted(m.rank for m in members if m.rank is not None and m.rank not in reports))
    found = compare(reports, silent) if reports else Finding(None, (), (), silent)
    where = Where(found, {rank: report.line for rank, report in reports.items()})
    call = found.collective if found.missing else None
    shown = {rank for rank in reports if rank in found.missing}
    shown.update({report.line: rank for rank, report in sorted(reports.items(), reverse=True)}.values())
    text = where.text()
    d.note(
        "no_tick",
        seconds=round(d.now - standstill.since, 3),
        ticks=standstill.ticks,
        call=call.text if call is not None else None,
        group=call.group if call is not None else None,
        number=call.number if call is not None else None,
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
        d.note("no_tick_ended", seconds=round(d.now - standstill.since, 3), goes_on=goes_on, reason=reason)
