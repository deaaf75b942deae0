"""Commands that do not use ``run``, called plain: the rules for their worlds (docs/decisions/plain-scripts.md).

The kind of a command is unknown until a worker uses ``run`` (elastic) or joins the process group that its environment
variables describe (plain). Until then a round has no generation, and the phase is Waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as replaced

from msgspec.structs import replace

from elasticstate.core import accounting, event_file, phases, slots, types as t
from elasticstate.core.diagnostics import missing, names
from elasticstate.core.state import Draft, Failure, Round, Together, Waiting, Worker
from elasticstate.core.types import exception_line, listed, number_of

_REMEDY = (
    "All workers of a job must use run, or none of them. Decorate the training function with elasticstate.run in every "
    "worker and remove init_process_group(), or remove run"
)


def mixture(d: Draft) -> str:
    """Return how workers of both kinds are in the job, or ""."""
    first = d.ledger.first_user
    if first is None or (d.generation and not _is_plain(d)):  # in an elastic world, the slot of such a newcomer fails
        return ""
    finished = [f"{slot_id}#{slot.incarnation}" for slot_id, slot in d.slots.items() if slot.finished]
    if finished:
        return f"{first} used run, but {listed(finished)} exited with 0 without run. {_REMEDY}"
    if not d.ledger.store_joined:
        return ""
    # Which worker has called it is unknown. Often all have, and then each of them has the same mistake.
    return f"init_process_group() was called outside run, although {first} uses run. {_REMEDY}"


def _is_plain(d: Draft) -> bool:
    return d.ledger.kind == "plain"


def is_running(d: Draft) -> bool:
    """Return True if all workers of a round run or have finished, and none has used ``run``: there is no time limit."""
    return d.ledger.round is not None and not d.ledger.round.end


# ---------------------------------------------------------------------------------------------------------- the facts


def run_used(d: Draft, worker_id: t.WorkerId) -> None:
    """Record that a worker uses ``run``."""
    worker = d.workers.get(worker_id)
    if worker is None or worker.gone or worker.uses_run:
        return
    d.put(worker, uses_run=True)
    command_uses_run(d, worker_id)


def command_uses_run(d: Draft, worker_id: t.WorkerId) -> None:
    """Record that the command is elastic, as its first worker that uses ``run`` shows: there are no rounds."""
    if d.ledger.first_user is None:
        d.update_ledger(first_user=worker_id)
    if d.ledger.kind == "":
        d.update_ledger(kind="elastic", round=None, no_progress=0, no_progress_cause=None, resets=0)


def store_joined(d: Draft, event: t.PlainStoreJoined) -> None:
    """Record that a worker has joined a process group without ``run``. The first one shows that the command is
    plain."""
    if event.generation != d.generation + 1 or d.ledger.kind == "plain":
        return
    d.update_ledger(store_joined=True)
    if d.ledger.kind == "":
        d.update_ledger(kind="plain")
        if d.ledger.round is not None and not d.ledger.round.end:
            slots.publish(d)


# ---------------------------------------------------------------------------------------------------------- the rules


def together(d: Draft, phase: Together) -> None:
    """Rule of the phase Together."""
    present = d.ledger.round
    assert present is not None
    if reason := mixture(d):
        phases.fail_job(d, reason, own_error=True)
    elif has_finished(d):
        phases.become_over(d, True)
    elif not _end_if_due(d, present):
        d.reason = _exits_awaited(d) or f"{number_of(len(present.members), 'worker')} without run"


def first_rounds(d: Draft) -> bool:
    """Rule of the phase Waiting while the kind of the command is unknown. Return True while a round ends."""
    present = d.ledger.round
    if present is None:
        return False
    if present.end:
        ends = _await_exits(d, present)
    else:
        ends = _end_if_due(d, present)
        if not ends:
            _exits_awaited(d)
    return ends and (d.ledger.round is not None or not isinstance(d.phase, Waiting))


def waiting_plain(d: Draft, phase: Waiting) -> None:
    """Rule of the phase Waiting between two worlds of plain workers."""
    present = d.ledger.round
    if (present is not None and _await_exits(d, present)) or isinstance(d.phase, Together):
        return
    limit_s = d.policy.elastic_timeout_s
    d.reason = f"too few free slots for a world: {d.policy.fewest_text(d.generation)}"
    if slots.may_train_on(d):
        d.reason = f"waiting until the workers on unreachable hosts have stopped: {listed(slots.unreachable_hosts(d))}"
    elif d.now >= phase.since + limit_s:
        who = listed(list(missing(d, d.now)), "; ")
        reason = f"--elastic-timeout of {limit_s:g} s expired: {d.reason}; missing: {who}"
        phases.fail_job(d, reason, d.ledger.outage, own_error=False)
        return
    if not phase.noticed and d.now >= phase.since + d.policy.waiting_notice_s:
        what = f"at least {number_of(d.policy.fewest(d.generation), 'free slot')}"
        d.note_waiting(what, listed(list(missing(d, d.now)), "; "))
        d.phase = replaced(phase, noticed=True)


def waiting_plain_deadlines(d: Draft, phase: Waiting) -> Iterator[tuple[str, float]]:
    yield "give up", phase.since + d.policy.elastic_timeout_s
    if not phase.noticed:
        yield "notice", phase.since + d.policy.waiting_notice_s
    yield "unreachable workers have given up", slots.unreachable_until(d)


def round_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the times at which the present round may end."""
    present = d.ledger.round
    if present is None or present.end:
        return
    yield "end of the round", present.ends_at
    if present.failure is not None:
        return
    if not present.noticed:
        yield "notice of exits", present.exits_since + d.policy.waiting_notice_s
    draining = _draining(d)
    if draining:
        yield "preemption window", phases.drain_time(d, draining)
    yield "join", _join_time(d, present)


def _members(d: Draft) -> list[Worker]:
    """Return the living workers of the present round."""
    return [worker for worker in d.workers.values() if worker.in_round and not worker.gone]


def _draining(d: Draft) -> list[Worker]:
    return [worker for worker in _members(d) if worker.draining] if d.draining else []


def has_finished(d: Draft) -> bool:
    """Return True if all workers of the present round have exited with 0."""
    present = d.ledger.round
    return present is not None and not present.end and len(_finished(d, present)) == len(present.members)


def _await_exits(d: Draft, present: Round) -> bool:
    """Forget a round that has ended, when all its workers have exited. Return True while one of them lives."""
    if not present.end:
        return False
    if not d.workers:
        d.update_ledger(round=None)
        return False
    d.reason = f"waiting for the exit of {names(list(d.workers.values()))}: {present.end}"
    return True


def _end_if_due(d: Draft, present: Round) -> bool:
    """End the round if a worker has failed, or if the members must change. Return True if the round ends."""
    if d.broken:
        failure, known = phases.first_cause(d.broken), present.failure
        if known is not None and phases.earlier(known.cause, failure.cause) is known.cause:
            failure = known
        ends_at = d.now if _is_plain(d) or not failure.own_error else max(d.now, d.ledger.quiet_until)
        if failure.cause.follows and _members(d):  # the failure from which it follows is still to be reported
            ends_at += d.policy.failure_grace_s
        present = replace(present, failure=failure, ends_at=min(present.ends_at, ends_at))
        d.update_ledger(round=present)
    draining = _draining(d)
    if present.failure is not None:  # not ended by plan meanwhile: the slot of the failed worker is free, too
        if d.now < present.ends_at:
            return False
        _fail(d, present, present.failure)
    elif draining and d.now >= phases.drain_time(d, draining):
        _change(d, present, listed(f"{worker.id} drains: {worker.draining}" for worker in draining))
    elif d.now >= _join_time(d, present) and not _finished(d, present) and (free := slots.newcomers(d)):
        d.update_ledger(planned_at=d.now)
        _change(d, present, listed(f"{slot_id} joins" for slot_id in free))
    else:
        return False
    return True


def _finished(d: Draft, present: Round) -> list[t.WorkerId]:
    """Return the workers of the round that have exited with 0."""
    return [member.worker for member in present.members if d.slots[member.worker.slot_id].finished]


def _exits_awaited(d: Draft) -> str:
    """Return which workers are awaited since others have exited with 0, or "". Report it once if it lasts."""
    present = d.ledger.round
    assert present is not None
    finished = _finished(d, present)
    if not finished or present.end:
        return ""
    if present.exits_since > d.now:
        present = replace(present, exits_since=d.now)
        d.update_ledger(round=present)
    who = names(_members(d))
    if not present.noticed and d.now >= present.exits_since + d.policy.waiting_notice_s:
        waited_s = d.now - present.exits_since
        have = "has" if len(finished) == 1 else "have"
        done = f"{listed(map(str, finished))} {have} exited with 0, the first {waited_s:.0f} s ago"
        d.note_waiting(f"the exit of all workers; {done}", who)
        d.update_ledger(round=replace(present, noticed=True))
    return f"waiting for the exit of {who}"


def _join_time(d: Draft, present: Round) -> float:
    """Return the time from which free slots may end a round to join the next one."""
    if not _is_plain(d):  # it has time to show its kind: an elastic worker would boot again for nothing
        return present.since + min(d.policy.waiting_notice_s, slots.patience_limit_s(d.time_to_give_up_s()))
    return d.ledger.planned_at + d.policy.min_interrupt_distance_s


def reattach_world(d: Draft, world: t.World, absent: list[str]) -> None:
    """Continue a world of plain workers with a new driver."""
    if absent:
        d.update_ledger(is_broken=True)
        accounting.generation_failed(d)
    d.phase = Together(since=d.now)
    reattach_round(d, world.members, absent)


def reattach_round(d: Draft, members: tuple[t.Placement, ...], absent: list[str]) -> None:
    """Continue a round with a new driver. End the round if ``absent`` members were not started, or if the previous
    driver has stopped them."""
    present = Round(members, d.now)
    d.update_ledger(round=present)
    if absent:
        _end(d, present, f"a new driver reattached; these members do not live: {listed(absent)}")


# ----------------------------------------------------------------------------------------------------- ends of rounds


def _end(d: Draft, present: Round, cause: str, more: event_file.PlainEndFields | None = None) -> None:
    """Stop all workers of the round. The next round starts when they have exited.

    ``more``: further fields of the event.
    """
    for worker in _members(d):
        slots.stop(d, worker, cause)
    for slot_id, slot in list(d.slots.items()):
        if slot.finished:
            d.put_slot(slot_id, finished=False)
    d.note(event_file.End, cause=cause, at="now", **(more or {}))
    d.update_ledger(round=replace(present, end=cause) if d.workers else None, is_broken=True)
    d.phase = Waiting(since=d.now) if isinstance(d.phase, Together) else d.phase
    d.reason = cause


def _change(d: Draft, present: Round, cause: str) -> None:
    """End the round by plan. End the job if planned changes count and exceed --reset-limit."""
    _end(d, present, cause, {"planned": True})
    if d.policy.counts_changes and (reason := phases.count_reset(d, "world")):
        phases.fail_job(d, f"{reason}; last: {cause}")


def _fail(d: Draft, present: Round, failure: Failure) -> None:
    """End the round by a failure. End the job if a limit is exceeded."""
    policy, ledger = d.policy, d.ledger
    if failure.kind == "drain":
        _change(d, present, failure.cause.reason)
        return
    if isinstance(d.phase, Together):
        accounting.generation_failed(d)
    lived_long = d.now - present.since >= slots.long_s(d)
    row = 0 if lived_long else ledger.no_progress
    first = None if lived_long else ledger.no_progress_cause
    if failure.own_error and _is_plain(d):
        row, first = row + 1, first or failure.cause
    exceeded = phases.count_reset(d, "world")
    d.update_ledger(
        restarts=ledger.restarts + 1,
        no_progress=row,
        no_progress_cause=first,
        outage=failure.cause if _is_plain(d) else ledger.outage or failure.cause,
    )
    _end(d, present, failure.cause.reason, _attempt(d, failure))
    if row >= policy.max_no_progress and not restarts_are_limited(d):
        soon = f"less than {slots.long_s(d):g} s after its start"
        phases.fail_without_progress(d, f"no progress: {row} times in a row a worker failed {soon}", first)
    elif exceeded:
        phases.fail_job(d, exceeded, failure.cause)


def restarts_are_limited(d: Draft) -> bool:
    """Return True if the user has chosen how often a script without ``run`` is started: no other limit counts then."""
    return bool(d.policy.reset_limit) and d.ledger.kind != "elastic"


def _attempt(d: Draft, failure: Failure) -> event_file.PlainEndFields:
    """Return which attempt of how many has failed, and why. ``attempts`` is None where there is no limit."""
    policy, ledger = d.policy, d.ledger
    number, limit = ledger.restarts, None
    if policy.reset_limit is not None:
        number, limit = ledger.resets, policy.reset_limit + 1
    elif failure.own_error:
        number, limit = ledger.no_progress if _is_plain(d) else ledger.restarts, policy.max_no_progress
    return {"attempt": number, "attempts": limit, "error": exception_line(failure.cause.error)}
