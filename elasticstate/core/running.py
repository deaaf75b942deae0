"""The phases Running, Finishing and Stopping: a world trains, then its members pass the exit gate, or are stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from elasticstate.core import accounting, event_file, types as t
from elasticstate.core.commits import check_commits
from elasticstate.core.diagnostics import leavers, names
from elasticstate.core.ending import (
    become_over,
    drain_deadlines,
    end_at,
    end_now,
    fail_drains,
    first_cause,
    judge,
    overdue_drains,
    shut_down,
    suspects_of,
    verdict_deadlines,
    warn_of_end,
)
from elasticstate.core.hangs import (
    check_stalls,
    check_ticks,
    end_stalls,
    overdue_stall,
    report_hang,
    stall_deadlines,
    standstill_deadlines,
)
from elasticstate.core.slots import stop
from elasticstate.core.state import Draft, Failure, Finishing, Running, Stopping, Worker
from elasticstate.core.stragglers import check_pace, end_stragglers
from elasticstate.core.types import listed, number_of
from elasticstate.core.worlds import candidates, enter, make_world, resumes_from_copy

# -------------------------------------------------------------------------------------------------------------- planned
# Planned changes: HOLD(g), the answers, END(g) at K = 1 + the highest number of ticks that a member has completed.


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
    d.note(event_file.Hold, cause=cause)
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
        d.note(
            event_file.Warning, text=f"no answer to a hold within {d.policy.hold_timeout_s:g} s from {names(silent)}"
        )
        if failed == FAILED_HOLDS_IN_A_ROW:
            d.note(
                event_file.Warning, text=f"{failed} holds in a row failed. Call commit() equally often on all ranks."
            )
    else:
        d.reason = f"hold: waiting for the answer of {names(silent)}"


def _release(d: Draft, phase: Running, cause: str) -> None:
    d.phase = replace(phase, hold_since=None, hold_cause="")
    d.update_ledger(released_at=d.now)
    d.effects.append(t.Release(d.generation))
    d.note(event_file.Release, cause=cause)
    d.reason = f"hold released: {cause}"


_UNEQUAL_TICKS = "Call commit() equally often on all ranks: count steps, not seconds."


def running(d: Draft, phase: Running) -> None:
    members = d.members()
    if d.broken:
        end_now(d, first_cause(d.broken))
    elif members and all(member.in_gate for member in members):
        become_finishing(d)
    elif overdue := overdue_drains(d, members):
        fail_drains(d, overdue)
    elif d.now >= _gate_end(d, phase, members):
        _fail_gate(d, phase, members)
    elif suspects := suspects_of(d, members):
        judge(d, members, suspects)
    elif stall := overdue_stall(d, phase):
        shut_down(d, phase, stall, members)
    else:
        if phase.gate_since is None:
            check_ticks(d, members)
            check_commits(d, phase, members)
        phase = check_stalls(d, _with_notices(d, phase, members), members)
        phase = d.phase = check_pace(d, phase, members)
        planned_change(d, phase, d.members())


def running_deadlines(d: Draft, phase: Running) -> Iterator[tuple[str, float]]:
    members = d.members()
    yield from drain_deadlines(d, members)
    yield "gate", _gate_end(d, phase, members)
    if suspects := suspects_of(d, members):
        yield from verdict_deadlines(d, suspects)
        return
    if phase.gate_since is not None and "gate" not in phase.noticed:
        yield "notice", phase.gate_since + d.policy.waiting_notice_s
    elif phase.gate_since is None and "ticks" not in phase.noticed:
        yield "notice", min((w.ticks_at for w in _behind(members)), default=inf) + d.policy.waiting_notice_s
    yield from stall_deadlines(d, phase, members)
    yield from standstill_deadlines(d)
    yield from planned_deadlines(d, phase, members)


def become_running(
    d: Draft, chosen: list[Worker], line: t.CommitId | None = None, sources: tuple[t.ShardSource, ...] = ()
) -> None:
    """Enter Running: publish a world of ``chosen``. END, at a tick or now, or the exit gate ends this phase.

    ``line`` and ``sources``: the commit from which a sharded job starts, and its copies.
    """
    before = {w.id for w in chosen if 0 < w.joined == d.generation}
    left = [p.worker for p in d.world.members if p.worker not in before] if d.world is not None else []
    if d.generation > 0 and d.ledger.down_since is None:  # planned: no failure since the last first tick
        d.update_ledger(planned_at=d.now)
    from_copy = line is None and d.ledger.highest is not None and resumes_from_copy(d, chosen)
    accounting.world_changes(d, chosen, line, from_copy)
    report_hang(d)
    world = make_world(d, chosen, line, sources)
    enter(d, world)
    d.effects.append(world)
    d.note(
        event_file.WorldFormed,
        size=world.size,
        hosts=world.members[0].cross_size,
        joined=[str(p.worker) for p in world.members if p.worker not in before],
        left=[str(worker) for worker in left],
        root=world.root,
        synced=len(world.lacking),
    )
    d.phase = Running(since=d.now)
    d.reason = f"world {world.generation}: {number_of(world.size, 'worker')}"


def _gate_end(d: Draft, phase: Running, members: list[Worker]) -> float:
    """Return the time at which the exit gate times out: those outside have made no progress for so long."""
    limit_s = d.policy.gate_timeout_s
    if phase.gate_since is None or limit_s is None:
        return inf
    outside = [member for member in members if not member.in_gate]
    return max([phase.gate_since, *(max(m.moved_at, m.reported_at - m.still_s) for m in outside)]) + limit_s


def _fail_gate(d: Draft, phase: Running, members: list[Worker]) -> None:
    outside = names([member for member in members if not member.in_gate])
    waited_s = d.now - (d.now if phase.gate_since is None else phase.gate_since)
    limit = f"--collective-timeout of {d.policy.gate_timeout_s:g} s"
    reason = (
        f"{outside} did not enter the exit gate, where the others have waited for {waited_s:.0f} s, and made no "
        f"progress for {limit}. Work after the last tick may call state.progress()"
    )
    warn_of_end(d, reason)
    end_now(d, Failure(t.RootCause(reason, generation=d.generation), "reported"))


def _with_notices(d: Draft, phase: Running, members: list[Worker]) -> Running:
    """Report the members outside the gate, or the members whose ticks do not advance while others are ahead."""
    notice_s = d.policy.waiting_notice_s
    if phase.gate_since is not None:
        outside = names([member for member in members if not member.in_gate])
        d.reason = f"waiting in the exit gate for {outside}"
        if "gate" not in phase.noticed and d.now >= phase.gate_since + notice_s:
            d.note_waiting("all members in the exit gate", outside)
            return replace(phase, noticed=(*phase.noticed, "gate"))
    elif "ticks" not in phase.noticed:
        late = [w for w in _behind(members) if d.now >= w.ticks_at + notice_s]
        if late:
            completed = max(member.ticks for member in members)
            d.note_waiting(f"tick {completed} on all members", names(late), _UNEQUAL_TICKS)
            return replace(phase, noticed=(*phase.noticed, "ticks"))
    return phase


def _behind(members: list[Worker]) -> list[Worker]:
    """Return the members that are more than one tick behind the member with the most ticks."""
    ticks = {member.ticks for member in members}
    if not ticks or max(ticks) - min(ticks) <= 1:
        return []
    ahead = max(ticks) - 1
    return [member for member in members if member.ticks < ahead]


def become_finishing(d: Draft) -> None:
    """Enter Finishing: all members are in the exit gate. The core leaves Finishing when all workers have exited."""
    if isinstance(d.phase, Running) and d.phase.hold_since is not None:
        d.effects.append(t.Release(d.generation))
        d.note(event_file.Release, cause="all members are in the exit gate")
    if d.ledger.has_ticked:
        gate_since = d.phase.gate_since if isinstance(d.phase, Running) else None
        accounting.training_resumed(d, d.now if gate_since is None else gate_since)
    d.effects.append(t.OpenGate(d.generation))
    d.phase = Finishing(since=d.now)
    d.reason = "all members are in the exit gate"


def finishing(d: Draft, phase: Finishing) -> None:
    failure = phase.failure or (d.broken[0] if d.broken else None)
    if failure is not phase.failure:
        accounting.generation_failed(d)
        phase = d.phase = replace(phase, failure=failure)
    awaited = d.members() or (leavers(d) if d.now < _awaited_until(d, phase) else [])
    if not awaited:
        become_over(d, failure is None, failure.cause if failure else None)
        return
    d.reason = f"exit gate open: waiting for the exit of {names(awaited)}"
    if not phase.noticed and d.now >= phase.since + d.policy.waiting_notice_s:
        d.note_waiting("the exit of all members; the exit gate is open", names(awaited))
        d.phase = replace(phase, noticed=True)


def finishing_deadlines(d: Draft, phase: Finishing) -> Iterator[tuple[str, float]]:
    """Yield the time at which the missing exits are reported, and the time after which no leaver is awaited."""
    if not phase.noticed:
        yield "notice", phase.since + d.policy.waiting_notice_s
    if not d.members() and leavers(d):
        yield "leavers", _awaited_until(d, phase)


def _awaited_until(d: Draft, phase: Finishing) -> float:
    return phase.since + d.policy.stop_timeout_s


def stop_job(d: Draft, by: str) -> None:
    """Stop the job. A world that trains has --stop-timeout for that: its members end in their own time."""
    phase = d.phase
    match phase:
        case Stopping():
            return
        case Running():
            end_stalls(d, phase)
            end_stragglers(d, phase)
            if phase.hold_since is not None:
                d.effects.append(t.Release(d.generation))
                d.note(event_file.Release, cause=f"the job is stopped by {by}")
            d.effects.append(t.Terminate(d.generation))
            d.phase = Stopping(since=d.now, reason=by)
        case _:
            become_over(d, False)
    d.reason = f"stopped by {by}"


def stopping(d: Draft, phase: Stopping) -> None:
    """Wait for the exits of all members. What breaks the world now ends no generation: no other world follows."""
    members = d.members()
    for suspect in suspects_of(d, members):
        if suspect.confirmed_at is None:
            d.effects.append(t.ConfirmOwnError(suspect.id, d.generation))
            d.put(suspect, confirmed_at=d.now)
    if members and d.now >= phase.since + d.policy.stop_timeout_s:
        for member in members:
            stop(d, member, f"no exit within --stop-timeout of {d.policy.stop_timeout_s:g} s", kill=True)
        members = []
    if not members:
        become_over(d, False)
        d.reason = f"stopped by {phase.reason}"
    elif not phase.is_open and all(member.in_gate for member in members):
        d.effects.append(t.OpenGate(d.generation))
        d.phase = replace(phase, is_open=True)
    else:
        d.reason = f"stopped by {phase.reason}: waiting for the exit of {names(members)}"


def stopping_deadlines(d: Draft, phase: Stopping) -> Iterator[tuple[str, float]]:
    yield "stop", phase.since + d.policy.stop_timeout_s
