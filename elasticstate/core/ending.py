"""The ends of generations: the entries to Forming and Over, the verdict on suspects, and the counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from elasticstate.core import accounting, event_file, types as t
from elasticstate.core.diagnostics import names
from elasticstate.core.hangs import absent, absent_text, begin_hang, note_stall_end, waiting_in_calls
from elasticstate.core.sharded import find_line, is_sharded
from elasticstate.core.slots import stop
from elasticstate.core.state import Draft, Failure, Forming, Over, Running, Stall, Worker
from elasticstate.core.types import exception_line, number_of

QUIET_S = 1.0  # seconds after a failure in which no worker starts; the new world's first tick ends this time early


def become_over(d: Draft, succeeded: bool, cause: t.RootCause | None = None) -> None:
    """Enter Over, from any phase. The core never leaves it."""
    if not succeeded and cause is not None:
        accounting.job_failed(d)
    if cause is not None:
        d.note(
            event_file.RootCause,
            reason=cause.reason,
            worker=str(cause.worker) if cause.worker else None,
            rank=cause.rank,
            in_generation=cause.generation,
            exit_code=cause.exit_code,
            signal=cause.signal,
            error=cause.error,
        )
    d.effects.append(t.EndJob(succeeded, cause))
    d.phase = Over(succeeded, d.now)
    d.reason = cause.reason if cause is not None else "all workers have finished"


def fail_job(d: Draft, reason: str, first: t.RootCause | None = None) -> None:
    """End the job as failed. The root cause describes ``first``, the failure that came first, if it is given."""
    if d.ledger.highest is not None and not _holds_a_commit(d):
        accounting.all_lost(d)
    if first is None:
        become_over(d, False, t.RootCause(reason, generation=d.generation))
    else:
        become_over(d, False, replace(first, reason=f"{reason}; first failure: {first.reason}"))


def _holds_a_commit(d: Draft) -> bool:
    """Return True if a commit is left: all of one, or a durable copy of which this driver knows."""
    if d.ledger.durable is not None:
        return True
    if is_sharded(d):
        return find_line(d) is not None
    joined = {host.name for host in d.hosts.values() if host.agent == "joined"}
    return any(slot.retained is not None and slot_id.host in joined for slot_id, slot in d.slots.items())


def fail_without_progress(d: Draft, reason: str, first: t.RootCause | None) -> None:
    """End the job as failed, because failures repeat. The reason has the exception of ``first``."""
    if first is not None and (exception := exception_line(first.error)):
        first = replace(first, reason=f"{first.reason}: {exception}")
    fail_job(d, reason, first)


def earlier(known: t.RootCause | None, found: t.RootCause) -> t.RootCause:
    """Return the earlier of two failures by the clocks of their hosts; without a clock time, the one reported first."""
    return found if known is None or 0 < found.time_ns < known.time_ns else known


def first_cause(found: list[Failure]) -> Failure:
    """Return the first death: it explains what other workers report. Without a death, return the first report."""
    deaths = [failure for failure in found if failure.kind in ("own", "lost")]
    first = deaths[0] if deaths else found[0]
    for failure in deaths:
        if earlier(first.cause, failure.cause) is failure.cause:
            first = failure
    return first


def end_at(d: Draft, tick: int, cause: str) -> None:
    """Change from Running to Forming by plan: at the end of ``tick`` all members save and leave."""
    generation = d.generation
    d.effects.append(t.End(generation, tick, cause))
    d.note(event_file.End, cause=cause, at=tick)
    drains = any(member.draining for member in d.members()) if d.draining else False
    d.phase = Forming(since=d.now, ended=generation, at_tick=tick, cause=cause, failure=None, clock=None, drains=drains)


def end_now(d: Draft, failure: Failure) -> None:
    """Change to Forming by a failure: from Running, or from a Forming whose tick will not be reached. All members roll
    back."""
    generation = d.generation
    cause = failure.cause.reason
    accounting.generation_failed(d)
    d.effects.append(t.End(generation, None, cause, failure.hang))
    d.note(event_file.End, cause=cause, at="now")
    if failure.hang:
        begin_hang(d, d.members())
    d.phase = Forming(
        since=d.now,
        ended=generation,
        at_tick=None,
        cause=cause,
        failure=failure,
        clock=d.now,
        drains=failure.kind == "drain",
    )
    d.update_ledger(
        quiet_until=d.now + QUIET_S,
        outage=d.ledger.outage or failure.cause,
        down_since=d.now if d.ledger.down_since is None else d.ledger.down_since,
    )


def warn_of_end(d: Draft, reason: str) -> None:
    """Report why the generation ends, if no death, hang or change of the hosts reports it."""
    d.warn(f"generation {d.generation} ends: {reason}")


def refine(d: Draft, phase: Forming, found: list[Failure]) -> None:
    """Replace a reported failure by the death that explains it."""
    if phase.failure is not None and phase.failure.kind == "reported":
        death = first_cause(found)
        if death.kind in ("own", "lost"):
            if d.ledger.outage == phase.failure.cause:
                d.update_ledger(outage=death.cause)
            d.phase = replace(phase, failure=death)


def settle(d: Draft, phase: Forming) -> None:
    """Count the ended generation, which all members have left. End the job if a limit is exceeded."""
    ledger, policy, failure = d.ledger, d.policy, phase.failure
    if d.world is not None and ledger.own_errors == d.world.size and ledger.own_error is not None:
        become_over(d, False, ledger.own_error)
        return
    if ledger.highest is not None and ledger.highest.generation >= phase.ended:
        d.update_ledger(no_progress=0, no_progress_cause=None)
    elif failure is not None and failure.kind in ("own", "reported"):
        d.update_ledger(no_progress=ledger.no_progress + 1, no_progress_cause=ledger.no_progress_cause or failure.cause)
    if failure is None and not policy.counts_changes:
        return
    exceeded = count_reset(d, phase.since, "generation")
    if d.ledger.no_progress >= policy.max_no_progress:
        row = d.ledger.no_progress
        reason = f"no progress: {row} generations in a row failed without a commit"
        fail_without_progress(d, reason, d.ledger.no_progress_cause)
    elif exceeded and failure is None:
        fail_job(d, f"{exceeded}; last: {phase.cause}")
    elif exceeded:
        fail_job(d, exceeded, d.ledger.outage)
    elif failure is not None and failure.kind == "reported" and failure.cause.worker is not None and not failure.hang:
        error = exception_line(failure.cause.error)
        d.warn(f"generation {phase.ended} ended: {failure.cause.reason}{error and f': {error}'}")


def count_reset(d: Draft, at: float, what: str) -> str:
    """Count an end of a world towards --reset-limit. Return the reason for which the job must end, or "".

    ``what``: "generation", or "world" for workers without ``run``.
    """
    policy, ended_at = d.policy, (*d.ledger.failed_at, at)
    d.update_ledger(failed_at=ended_at[-1 - (policy.reset_limit or 0) :])
    if policy.reset_limit is None or len(ended_at) <= policy.reset_limit:
        return ""
    have = "has" if len(ended_at) == 1 else "have"
    how = "ended" if policy.counts_changes else "failed"
    return f"reset limit: {number_of(len(ended_at), what)} {have} {how}, --reset-limit is {policy.reset_limit}"


# ------------------------------------------------------------------------------------------ decisions by time-out


def overdue_drains(d: Draft, members: list[Worker]) -> list[Worker]:
    """Return the members whose drain has lasted for --drain-timeout without READY."""
    limit_s = d.policy.drain_timeout_s
    return [w for w in _unfinished_drains(d, members) if d.now >= w.draining_since + limit_s]


def drain_deadlines(d: Draft, members: list[Worker]) -> Iterator[tuple[str, float]]:
    """Yield the time at which the first drain becomes overdue."""
    drains = _unfinished_drains(d, members)
    if drains:
        yield "drain", min(w.draining_since for w in drains) + d.policy.drain_timeout_s


def _unfinished_drains(d: Draft, members: list[Worker]) -> list[Worker]:
    return [w for w in members if w.draining and w.ready is None] if d.draining else []


def fail_drains(d: Draft, overdue: list[Worker]) -> None:
    """Stop workers whose drain is overdue. A generation that still runs fails."""
    limit_s = d.policy.drain_timeout_s
    for worker in overdue:
        stop(d, worker, f"{worker.draining}; not drained within --drain-timeout of {limit_s:g} s", overdue=True)
    if is_live(d):
        reason = f"{names(overdue)} did not drain within --drain-timeout of {limit_s:g} s"
        warn_of_end(d, reason)
        end_now(d, Failure(t.RootCause(reason, generation=d.generation), "drain"))


def is_live(d: Draft) -> bool:
    """Return True if the present generation may still complete ticks."""
    return isinstance(d.phase, Running) or (isinstance(d.phase, Forming) and d.phase.at_tick is not None)


def suspects_of(d: Draft, members: list[Worker]) -> list[Worker]:
    """Return the members with an error that may be their own, in the order of the errors."""
    suspects = [w for w in members if w.suspect_at is not None] if d.suspects else []
    suspects.sort(key=lambda w: (w.suspect_at, w.rank))
    return suspects


def verdict_deadlines(d: Draft, suspects: list[Worker]) -> Iterator[tuple[str, float]]:
    """Yield the time of the next decision on the suspects."""
    confirmed = [w.confirmed_at for w in suspects if w.confirmed_at is not None]
    if confirmed:
        yield "exit after an own error", min(confirmed) + d.policy.regroup_timeout_s
    elif suspects:
        yield "verdict", _judged_at(d, suspects)


def _judged_at(d: Draft, suspects: list[Worker]) -> float:
    return (suspects[0].suspect_at or 0.0) + d.policy.failure_grace_s


def judge(d: Draft, members: list[Worker], suspects: list[Worker]) -> None:
    """Judge the suspects. The verdict OWN needs proof: time for evidence has passed, and after that time every other
    member has sent a sign of life."""
    confirmed = [w for w in suspects if w.confirmed_at is not None]
    judged_at = _judged_at(d, suspects)
    silent = [w for w in members if w is not suspects[0] and w.reported_at < judged_at]
    if confirmed:
        d.reason = f"waiting for the exit of {names(confirmed)} after own errors"
        _stop_stuck(d, confirmed)
    elif d.now < judged_at or silent:
        d.reason = f"looking for the cause of the error of {names(suspects)}"
        if d.now >= judged_at:
            d.reason += f"; no heartbeat since then from {names(silent)}"
    else:
        for suspect in suspects:
            d.effects.append(t.ConfirmOwnError(suspect.id, d.generation))
            d.put(suspect, confirmed_at=d.now)
        d.reason = f"own error of {names(suspects)}: all other members are alive"


def _stop_stuck(d: Draft, confirmed: list[Worker]) -> None:
    """Kill workers that have not exited after their own errors: the other members cannot wait forever."""
    limit_s = d.policy.regroup_timeout_s
    stuck = [w for w in confirmed if d.now >= (w.confirmed_at or 0.0) + limit_s]
    for worker in stuck:
        stop(
            d, worker, f"no exit within --regroup-timeout of {limit_s:g} s after its own error", kill=True, overdue=True
        )
    if stuck:
        cause = d.root_cause(stuck[0], f"{stuck[0].id} failed with its own error", stuck[0].suspect_error)
        error = exception_line(cause.error)
        unended = f"{names(stuck)} failed with an error, and did not exit within --regroup-timeout of {limit_s:g} s"
        warn_of_end(d, f"{unended}{error and f': {error}'}")
        d.update_ledger(own_errors=d.ledger.own_errors + len(stuck), own_error=d.ledger.own_error or cause)
        end_now(d, Failure(cause, "own", own_error=True))


def shut_down(d: Draft, phase: Running, stall: Stall, members: list[Worker]) -> None:
    """End the job as failed, because of a stall."""
    inside = waiting_in_calls(members).get(stall.call, [])
    missing = absent(inside, members)
    limit_s = d.policy.stall_shutdown_s
    reason = (
        f"stall: {stall.text} was not made on all ranks within --stall-shutdown-time of {limit_s:g} s; missing: "
        f"{absent_text(missing)}"
    )
    for each in phase.stalls:
        note_stall_end(d, each, "--stall-shutdown-time")
    d.phase = replace(phase, stalls=())
    cause = t.RootCause(reason, generation=d.generation)
    become_over(d, False, d.root_cause(missing[0], reason) if missing else cause)
