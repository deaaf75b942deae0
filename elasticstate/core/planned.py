"""Planned changes: HOLD(g), the answers, END(g) at K = 1 + the highest number of ticks that a member has completed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from elasticstate.core import types as t
from elasticstate.core.diagnostics import names
from elasticstate.core.ending import end_at
from elasticstate.core.records import Draft, Running, Worker
from elasticstate.core.texts import listed
from elasticstate.core.worlds import candidates

FAILED_HOLDS_IN_A_ROW = 3
_HOLDS_OF_A_DRAIN = 6  # the least number within --drain-timeout, if each fails at once


def planned_change(d: Draft, phase: Running, members: list[Worker]) -> None:
    """Begin or continue an interrupt for READY newcomers or for draining members."""
    if phase.hold_since is not None:
        _holding(d, phase, members)
        return
    draining, newcomers = _who_changes(d, members)
    if not draining and not newcomers:
        d.reason = d.reason or "training"
    elif phase.gate_since is not None:
        d.reason += "; no interrupt while a member is in the exit gate"
    elif not phase.first_tick:
        d.reason = "interrupt delayed until the first tick of the world"
    elif d.now < _pause_end(d, draining):
        d.reason = "interrupt delayed: the last hold failed"
    elif (draining and d.now >= drain_time(d, draining)) or (newcomers and d.now >= _join_time(d, newcomers)):
        cause = listed([f"{w.id} drains: {w.draining}" for w in draining] + [f"{w.id} joins" for w in newcomers])
        _hold(d, phase, members, cause)
    elif newcomers and d.now < _join_window_end(d, newcomers):
        d.reason = f"{names(newcomers)} ready; waiting for --join-window, because other workers are booting"
    elif newcomers:
        d.reason = f"{names(newcomers)} ready; waiting for --min-interrupt-distance after the last interrupt"
    else:
        d.reason = f"draining: {names(draining)}; waiting for more preemption notices"


def planned_deadlines(d: Draft, phase: Running, members: list[Worker]) -> Iterator[tuple[str, float]]:
    """Yield the times at which a hold fails or may begin."""
    if phase.hold_since is not None:
        yield "hold", phase.hold_since + d.policy.hold_timeout_s
        return
    draining, newcomers = _who_changes(d, members)
    if phase.gate_since is not None or not phase.first_tick or not (draining or newcomers):
        return
    yield "pause after a hold", _pause_end(d, draining)
    if draining:
        yield "preemption window", drain_time(d, draining)
    if newcomers:
        yield "join", _join_time(d, newcomers)


def _who_changes(d: Draft, members: list[Worker]) -> tuple[list[Worker], list[Worker]]:
    """Return the members that drain, and the READY newcomers that fit into the next world."""
    draining = [member for member in members if member.draining] if d.draining else []
    newcomers = candidates(d)
    if d.policy.max_np is not None:
        newcomers = newcomers[: max(0, d.policy.max_np - len(members) + len(draining))]
    return draining, newcomers


def drain_time(d: Draft, draining: list[Worker]) -> float:
    """Return the time of the interrupt for draining members: at once if discovery has removed their slots. After a
    preemption notice the window delays it, so that hosts preempted together cause one interrupt."""
    if any(worker.id.slot >= d.hosts[worker.id.host].slots for worker in draining):
        return -inf
    window_s = min(d.policy.preemption_window_s, d.policy.drain_timeout_s / 2)
    return min(worker.draining_since for worker in draining) + window_s


def _pause_end(d: Draft, draining: list[Worker]) -> float:
    """Return the time from which another hold may follow one that has failed. For a drain it is tried several times."""
    pause_s = d.policy.min_interrupt_distance_s
    return d.ledger.released_at + (min(pause_s, d.policy.drain_timeout_s / _HOLDS_OF_A_DRAIN) if draining else pause_s)


def _join_time(d: Draft, newcomers: list[Worker]) -> float:
    """Return the time from which READY newcomers may interrupt the world."""
    return max(_join_window_end(d, newcomers), d.ledger.planned_at + d.policy.min_interrupt_distance_s)


def _join_window_end(d: Draft, newcomers: list[Worker]) -> float:
    """Return the time until which newcomers wait for workers that still boot."""
    return min(worker.ready_at for worker in newcomers) + d.policy.join_window_s if d.booting else -inf


def _hold(d: Draft, phase: Running, members: list[Worker], cause: str) -> None:
    for member in members:
        d.put(member, answer=None)
    d.update_ledger(holds=d.ledger.holds + 1)
    d.phase = replace(phase, hold_since=d.now, hold_cause=cause)
    d.effects.append(t.Hold(d.generation, d.ledger.holds))
    d.note("hold", cause=cause)
    d.reason = f"hold: {cause}"


def _holding(d: Draft, phase: Running, members: list[Worker]) -> None:
    silent = [member for member in members if member.answer is None]
    in_gate = [member for member in members if member.in_gate or (member.answer is not None and member.answer[1])]
    if in_gate:
        _release(d, phase, f"{names(in_gate)} in the exit gate")
    elif not silent:
        d.update_ledger(holds_failed=0)
        end_at(d, 1 + max(member.answer[0] for member in members if member.answer is not None), phase.hold_cause)
    elif phase.hold_since is not None and d.now >= phase.hold_since + d.policy.hold_timeout_s:
        _release(d, phase, f"no answer from {names(silent)}")
        failed = d.ledger.holds_failed + 1
        d.update_ledger(holds_failed=failed)
        d.note("warning", text=f"no answer to a hold within {d.policy.hold_timeout_s:g} s from {names(silent)}")
        if failed == FAILED_HOLDS_IN_A_ROW:
            d.note("warning", text=f"{failed} holds in a row failed. Call commit() equally often on all ranks.")
    else:
        d.reason = f"hold: waiting for the answer of {names(silent)}"


def _release(d: Draft, phase: Running, cause: str) -> None:
    d.phase = replace(phase, hold_since=None, hold_cause="")
    d.update_ledger(released_at=d.now)
    d.effects.append(t.Release(d.generation))
    d.note("release", cause=cause)
    d.reason = f"hold released: {cause}"
