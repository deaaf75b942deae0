"""Planned changes: HOLD(g), the answers, END(g) at K = 1 + the most ticks that anybody has completed."""

from __future__ import annotations

from dataclasses import replace

from elasticstate.core import types as t
from elasticstate.core.ending import end_at
from elasticstate.core.forming import candidates
from elasticstate.core.missing import listed, names
from elasticstate.core.records import Draft, Running, Worker

FAILED_HOLDS_IN_A_ROW = 3


def planned_change(d: Draft, phase: Running, members: list[Worker]) -> None:
    """Begin, or go on with, an interrupt for newcomers that are READY or for leavers."""
    if phase.hold_since is not None:
        _holding(d, phase, members)
        return
    leavers = [member for member in members if member.leaving] if d.leaving else []
    newcomers = _newcomers(d, len(members) - len(leavers))
    if not leavers and not newcomers:
        d.reason = d.reason or "the world trains"
    elif phase.gate_since is not None:
        d.reason += ": no interrupt while a member stands there"
    elif not phase.first_tick:
        d.reason = "an interrupt waits for the first tick of the world"
    elif not d.due(d.ledger.hold_not_before):
        d.reason = "an interrupt waits: the last hold came to nothing"
    elif (leavers and _is_time_to_leave(d, leavers)) or (newcomers and _admitted(d, newcomers)):
        cause = listed([f"{w.id} leaves: {w.leaving}" for w in leavers] + [f"{w.id} joins" for w in newcomers])
        _hold(d, phase, members, cause)


def _newcomers(d: Draft, staying: int) -> list[Worker]:
    """READY workers for which the next world has room."""
    found = candidates(d)
    return found if d.policy.max_np is None else found[: max(0, d.policy.max_np - staying)]


def _is_time_to_leave(d: Draft, leavers: list[Worker]) -> bool:
    """At once, if discovery wants it so; after a notice others may have one, too, and all are to cost one interrupt."""
    if any(worker.id.slot >= d.hosts[worker.id.host].slots for worker in leavers):
        return True
    window_s = min(d.policy.preemption_window_s, d.policy.drain_timeout_s / 2)
    if d.due(min(worker.leaving_at for worker in leavers) + window_s):
        return True
    d.reason = f"{names(leavers)} had notice: the preemption window is open, others may have it, too"
    return False


def _admitted(d: Draft, newcomers: list[Worker]) -> bool:
    """Whether it is time to stop the world for these."""
    window_ends = min(worker.ready_at for worker in newcomers) + d.policy.join_window_s
    if d.booting and not d.due(window_ends):
        d.reason = f"{names(newcomers)} ready: the join window is open, others boot"
        return False
    if not d.due(d.ledger.planned_at + d.policy.min_interrupt_distance_s):
        d.reason = f"{names(newcomers)} ready: the last interrupt was a short time ago"
        return False
    return True


def _hold(d: Draft, phase: Running, members: list[Worker], cause: str) -> None:
    for member in members:
        d.put(member, answer=None)
    d.account(holds=d.ledger.holds + 1)
    d.phase = replace(phase, hold_since=d.now, hold_cause=cause)
    d.effects.append(t.Hold(d.generation, d.ledger.holds))
    d.note("hold", cause=cause)
    d.reason = f"holds the world: {cause}"


def _holding(d: Draft, phase: Running, members: list[Worker]) -> None:
    silent = [member for member in members if member.answer is None]
    in_gate = [member for member in members if member.in_gate or (member.answer is not None and member.answer[1])]
    if in_gate:
        _release(d, phase, f"{names(in_gate)} in the exit gate")
    elif not silent:
        d.account(holds_failed=0)
        end_at(d, 1 + max(member.answer[0] for member in members if member.answer is not None), phase.hold_cause)
    elif phase.hold_since is not None and d.due(phase.hold_since + d.policy.hold_timeout_s):
        _release(d, phase, f"no answer from {names(silent)}")
        failed = d.ledger.holds_failed + 1
        d.account(holds_failed=failed)
        d.note("warning", text=f"no answer to a hold within {d.policy.hold_timeout_s:g} s from {names(silent)}")
        if failed == FAILED_HOLDS_IN_A_ROW:
            d.note("warning", text=f"{failed} holds in a row have failed: is commit() called on some ranks only?")
    else:
        d.reason = f"holds the world, waits for the answer of {names(silent)}"


def _release(d: Draft, phase: Running, cause: str) -> None:
    d.phase = replace(phase, hold_since=None, hold_cause="")
    d.account(hold_not_before=d.now + d.policy.min_interrupt_distance_s)
    d.effects.append(t.Release(d.generation))
    d.note("release", cause=cause)
    d.reason = f"nobody is interrupted: {cause}"
