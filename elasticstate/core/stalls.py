"""The stall check: reports calls in which some ranks wait for too long, and ends the job if a stall lasts longer.

A worker's first report of a long wait does not say which other ranks wait: they may have waited for less time, and then
nothing has reached the driver. So the core first requests the newest calls of all members, and reports the stall when
the answers have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from elasticstate.core import diagnostics, event_file, types as t
from elasticstate.core.ending import become_over
from elasticstate.core.state import Draft, Finishing, Running, Stall, Worker

ANSWER_S = 1.0  # seconds for the agents to answer the request for all calls
_CALL_ENDED = "the call has ended"


def call_reported(d: Draft, worker: Worker, report: t.CallReport) -> None:
    """Record the newest call of a member of the present world."""
    if not isinstance(d.phase, Running):
        return
    waits_since = inf if report.waiting_s is None else d.now - max(0.0, report.waiting_s)
    d.put(worker, call=report, waits_since=waits_since, reported_at=d.now)
    if not d.phase.has_calls:
        d.phase = replace(d.phase, has_calls=True)


def check_stalls(d: Draft, phase: Running, members: list[Worker]) -> Running:
    """Report stalls that have begun or ended. Return the phase with the present stalls."""
    if not phase.has_calls:
        return phase
    groups = diagnostics.waiting(members)
    known = tuple(stall for stall in phase.stalls if stall.call in groups)
    for stall in phase.stalls:
        if stall not in known:
            _note_end(d, stall, _CALL_ENDED)
    due = [inside for call, inside in _unreported(d, groups, known, members) if d.now >= _due_at(d, inside)]
    watched_since = phase.watched_since
    if due and watched_since is None:
        d.effects.append(t.WatchCalls(d.generation, True))
        watched_since = d.now
    elif due and watched_since is not None and d.now >= watched_since + ANSWER_S:
        known = (*known, *(_begin(d, inside, members) for inside in due))
    elif not due and not known and watched_since is not None:
        d.effects.append(t.WatchCalls(d.generation, False))
        watched_since = None
    changed = replace(phase, stalls=known, watched_since=watched_since)
    return phase if changed == phase else changed


def stall_deadlines(d: Draft, phase: Running, members: list[Worker]) -> Iterator[tuple[str, float]]:
    """Yield the times at which a stall must be reported, or ends the job."""
    if not phase.has_calls:
        return
    groups = diagnostics.waiting(members)
    due_at = min((_due_at(d, inside) for _, inside in _unreported(d, groups, phase.stalls, members)), default=inf)
    yield "stall check", due_at if phase.watched_since is None else max(due_at, phase.watched_since + ANSWER_S)
    yield "stall shutdown", min((_shutdown_at(d, stall) for stall in phase.stalls), default=inf)


def overdue_stall(d: Draft, phase: Running) -> Stall | None:
    """Return a stall that has lasted for --stall-shutdown-time."""
    return next((stall for stall in phase.stalls if d.now >= _shutdown_at(d, stall)), None)


def shut_down(d: Draft, phase: Running, stall: Stall, members: list[Worker]) -> None:
    """End the job as failed, because of a stall."""
    inside = diagnostics.waiting(members).get(stall.call, [])
    missing = diagnostics.absent(inside, members) if inside else []
    limit_s = d.policy.stall_shutdown_s
    reason = (
        f"stall: {stall.text} was not made on all ranks within --stall-shutdown-time of {limit_s:g} s; missing: "
        f"{diagnostics.absent_text(missing)}"
    )
    for each in phase.stalls:
        _note_end(d, each, "--stall-shutdown-time")
    d.phase = replace(phase, stalls=())
    cause = t.RootCause(reason, generation=d.generation)
    become_over(d, False, d.root_cause(missing[0], reason) if missing else cause)


def end_stalls(d: Draft, phase: Running) -> None:
    """Report the end of all stalls: ``phase`` has ended."""
    reason = _CALL_ENDED if isinstance(d.phase, Finishing) else f"generation {d.generation} has ended"
    for stall in phase.stalls:
        _note_end(d, stall, reason)


def _unreported(
    d: Draft, groups: dict[diagnostics.Call, list[Worker]], known: tuple[Stall, ...], members: list[Worker]
) -> Iterator[tuple[diagnostics.Call, list[Worker]]]:
    """Yield the calls with missing ranks, and the members that wait there, unless the stall is reported already."""
    reported = {stall.call for stall in known}
    for call, inside in groups.items():
        if call not in reported and diagnostics.absent(inside, members):
            yield call, inside


def _due_at(d: Draft, inside: list[Worker]) -> float:
    limit_s = d.policy.stall_check_s
    return inf if limit_s is None else diagnostics.since(inside) + limit_s


def _shutdown_at(d: Draft, stall: Stall) -> float:
    limit_s = d.policy.stall_shutdown_s
    return inf if limit_s is None else stall.since + limit_s


def _begin(d: Draft, inside: list[Worker], members: list[Worker]) -> Stall:
    """Report a stall, and return it."""
    assert inside[0].call is not None
    missing = diagnostics.absent(inside, members)
    stall = Stall(
        (inside[0].call.process_set, inside[0].call.number), diagnostics.text_of(inside), diagnostics.since(inside)
    )
    d.note(
        event_file.Stall,
        call=stall.text,
        seconds=round(d.now - stall.since, 3),
        waiting=[worker.rank or 0 for worker in inside],
        missing=[worker.rank or 0 for worker in missing],
        who=diagnostics.absent_text(missing),
    )
    return stall


def _note_end(d: Draft, stall: Stall, reason: str) -> None:
    d.note(event_file.StallEnded, call=stall.text, seconds=round(d.now - stall.since, 3), reason=reason)
