"""The phase Forming: a generation has ended, and the core waits for its living members to form the next world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from elasticstate.core import types as t
from elasticstate.core.diagnostics import names
from elasticstate.core.ending import (
    drain_deadlines,
    end_now,
    fail_drains,
    first_cause,
    is_live,
    judge,
    overdue_drains,
    refine,
    settle,
    suspects_of,
    verdict_deadlines,
)
from elasticstate.core.hangs import reports_until
from elasticstate.core.records import Draft, Failure, Forming, Worker
from elasticstate.core.running import become_finishing
from elasticstate.core.standstill import check_ticks, standstill_deadlines
from elasticstate.core.waiting import become_waiting, form
from elasticstate.core.worlds import (
    staying,
)


def forming(d: Draft, phase: Forming) -> None:
    members = d.members()
    if d.broken:
        if is_live(d) and any(member.ready is None for member in members):
            end_now(d, first_cause(d.broken))
        else:
            refine(d, phase, d.broken)
    elif is_live(d) and members and all(member.in_gate for member in members):
        become_finishing(d)  # train has returned on all members before tick K: no member is left to interrupt
        return
    if overdue := overdue_drains(d, members):
        fail_drains(d, overdue)
        members = d.members()
    if is_live(d) and (suspects := suspects_of(d, members)):
        judge(d, members, suspects)
        members = d.members()
    phase, awaited = _forming(d), _awaited(members)
    if d.now >= _regroup_end(d, phase, awaited):
        _give_up(d, phase, awaited)
        phase, awaited = _forming(d), []
    if awaited:
        if not phase.noticed and d.now >= phase.since + d.policy.waiting_notice_s:
            d.note("waiting", **{"for": f"the end of generation {phase.ended}", "who": names(awaited)})
            d.phase = replace(phase, noticed=True)
        if is_live(d) and phase.clock is None:
            check_ticks(d, members)
        d.reason = f"waiting for {names(awaited)} to leave generation {phase.ended}"
        return
    if phase.clock is not None and d.now < reports_until(d, phase.clock):
        d.reason = f"waiting for reports on the hang of generation {phase.ended}"
        return
    settle(d, phase)
    if isinstance(d.phase, Forming) and (len(staying(d)) < d.policy.min_np or not form(d)):
        become_waiting(d)


def forming_deadlines(d: Draft, phase: Forming) -> Iterator[tuple[str, float]]:
    members = d.members()
    yield from drain_deadlines(d, members)
    if is_live(d):
        yield from verdict_deadlines(d, suspects_of(d, members))
        yield from standstill_deadlines(d)
    awaited = _awaited(members)
    yield "regroup", _regroup_end(d, phase, awaited)
    if awaited and not phase.noticed:
        yield "notice", phase.since + d.policy.waiting_notice_s
    if not awaited and phase.clock is not None:
        yield "reports on a hang", reports_until(d, phase.clock)


def _regroup_end(d: Draft, phase: Forming, awaited: list[Worker]) -> float:
    """Return the time at which the core gives up members that have not left the generation."""
    return phase.clock + d.policy.regroup_timeout_s if awaited and phase.clock is not None else inf


def _awaited(members: list[Worker]) -> list[Worker]:
    """Return the members that may still become READY. A member with a confirmed own error will not. If all members
    have one, their exits are awaited."""
    found = [w for w in members if w.ready is None and not w.late]
    if all(w.confirmed_at is not None for w in members):
        return found
    return [w for w in found if w.confirmed_at is None]


def _give_up(d: Draft, phase: Forming, awaited: list[Worker]) -> None:
    """Handle the regroup time-out: late members keep their slots and may join later, as newcomers."""
    limit_s = d.policy.regroup_timeout_s
    reason = f"{names(awaited)} did not leave generation {phase.ended} within --regroup-timeout of {limit_s:g} s"
    cause = t.RootCause(reason, generation=phase.ended)
    if phase.at_tick is not None:
        end_now(d, Failure(cause, "lost"))
    elif phase.failure is not None and phase.failure.kind == "reported":
        d.phase = replace(phase, failure=Failure(cause, "lost"))
    d.note("warning", text=reason)
    for worker in awaited:
        d.put(worker, late=True)


def _forming(d: Draft) -> Forming:
    assert isinstance(d.phase, Forming)
    return d.phase
