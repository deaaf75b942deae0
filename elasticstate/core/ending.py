"""How a generation ends: the entries to Forming and Over, the verdict on suspects, and what is counted."""

from __future__ import annotations

from dataclasses import replace

from elasticstate.core import types as t
from elasticstate.core.missing import names
from elasticstate.core.records import Draft, Failure, Forming, Over, Running, Worker
from elasticstate.core.seats import stop

QUIET_S = 1.0  # after a failure no worker is started for so long, or until the new world's first tick


def become_over(d: Draft, succeeded: bool, cause: t.RootCause | None = None) -> None:
    """In: from every phase. Out: never."""
    if cause is not None:
        d.note(
            "root_cause",
            reason=cause.reason,
            worker=str(cause.worker) if cause.worker else None,
            rank=cause.rank,
            in_generation=cause.generation,
            exit_code=cause.exit_code,
            signal=cause.signal,
            error=cause.error,
        )
    d.effects.append(t.EndJob(succeeded, cause))
    d.become(Over(succeeded))
    d.reason = cause.reason if cause is not None else "all workers have finished"


def fail_job(d: Draft, reason: str, first: t.RootCause | None = None) -> None:
    """End the job. ``first``, the failure that began it, is what the root cause tells of."""
    if first is None:
        become_over(d, False, t.RootCause(reason, generation=d.generation))
    else:
        become_over(d, False, replace(first, reason=f"{reason}; first failure: {first.reason}"))


def earlier(known: t.RootCause | None, found: t.RootCause) -> t.RootCause:
    """Which of two failures was the first: by the clocks of their hosts, or the one that was heard of first."""
    return found if known is None or 0 < found.time_ns < known.time_ns else known


def first_cause(found: list[Failure]) -> Failure:
    """A death explains what others report; of several deaths the first."""
    deaths = [failure for failure in found if failure.kind in ("own", "lost")]
    first = deaths[0] if deaths else found[0]
    for failure in deaths:
        if earlier(first.cause, failure.cause) is failure.cause:
            first = failure
    return first


def end_at(d: Draft, tick: int, cause: str) -> None:
    """Running -> Forming, planned: at the end of ``tick`` all save and leave."""
    generation = d.generation
    d.effects.append(t.End(generation, tick, cause))
    d.note("end", cause=cause, at=tick)
    d.become(Forming(since=d.now, ended=generation, at_tick=tick, cause=cause, failure=None, clock=None))


def end_now(d: Draft, failure: Failure) -> None:
    """Running -> Forming by a failure; or Forming at a tick that will not be reached: all roll back."""
    generation = d.generation
    cause = failure.cause.reason
    d.effects.append(t.End(generation, None, cause))
    d.note("end", cause=cause, at="now")
    d.become(Forming(since=d.now, ended=generation, at_tick=None, cause=cause, failure=failure, clock=d.now))
    d.account(
        quiet_until=d.now + QUIET_S,
        outage=d.ledger.outage or failure.cause,
        down_since=d.now if d.ledger.down_since is None else d.ledger.down_since,
    )


def refine(d: Draft, phase: Forming, found: list[Failure]) -> None:
    """A death explains what others had only reported."""
    if phase.failure is not None and phase.failure.kind == "reported":
        death = first_cause(found)
        if death.kind in ("own", "lost"):
            if d.ledger.outage == phase.failure.cause:
                d.account(outage=death.cause)
            d.phase = replace(phase, failure=death)


def settle(d: Draft, phase: Forming) -> None:
    """The ended generation is left by all: count it, and end the job if that was one too many."""
    ledger, policy, failure = d.ledger, d.policy, phase.failure
    if d.world is not None and ledger.own_errors == d.world.size and ledger.own_error is not None:
        become_over(d, False, ledger.own_error)
        return
    if ledger.highest is not None and ledger.highest.generation >= phase.ended:
        d.account(no_progress=0, no_progress_cause=None)
    elif failure is not None and failure.kind in ("own", "reported"):
        d.account(no_progress=ledger.no_progress + 1, no_progress_cause=ledger.no_progress_cause or failure.cause)
    if failure is None:
        return
    failed_at = (*ledger.failed_at, phase.since)
    if policy.reset_window_s is not None:
        failed_at = tuple(at for at in failed_at if at > d.now - policy.reset_window_s)
    d.account(failed_at=failed_at[-1 - (policy.reset_limit or 0) :])
    if d.ledger.no_progress >= policy.max_no_progress:
        row = d.ledger.no_progress
        fail_job(d, f"no progress: {row} generations in a row failed without a commit", d.ledger.no_progress_cause)
    elif policy.reset_limit is not None and len(failed_at) > policy.reset_limit:
        within = f" within --reset-window of {policy.reset_window_s:g} s" if policy.reset_window_s is not None else ""
        reason = f"reset limit: {len(failed_at)} generations have failed{within}, --reset-limit is {policy.reset_limit}"
        fail_job(d, reason, d.ledger.outage)


# ---------------------------------------------------------------------------------- facts that time makes certain


def drain_is_over(d: Draft, members: list[Worker]) -> bool:
    """Stop the leavers whose time is up before they were READY; a generation that still runs fails by it."""
    if not d.leaving:
        return False
    limit_s = d.policy.drain_timeout_s
    expired = [w for w in members if w.leaving and w.ready is None and d.due(w.leaving_at + limit_s)]
    for worker in expired:
        stop(d, worker, f"{worker.leaving}; not drained within {limit_s:g} s")
    if expired and is_live(d):
        reason = f"{names(expired)} did not drain within {limit_s:g} s"
        end_now(d, Failure(t.RootCause(reason, generation=d.generation), "drain"))
    return bool(expired)


def is_live(d: Draft) -> bool:
    """Whether the present generation may still make ticks."""
    return isinstance(d.phase, Running) or (isinstance(d.phase, Forming) and d.phase.at_tick is not None)


def verdict(d: Draft, members: list[Worker]) -> bool:
    """Judge the suspects. OWN needs proof: time for evidence, and every other member heard after it. True: some."""
    suspects = [w for w in members if w.suspect_at is not None] if d.suspects else []
    suspects.sort(key=lambda w: (w.suspect_at, w.rank))
    if not suspects:
        return False
    first = suspects[0]
    if any(w.confirmed_at is not None for w in suspects):
        d.reason = f"waits for the exit of {names([w for w in suspects if w.confirmed_at is not None])}: own errors"
        return _stop_if_stuck(d, suspects)
    judged_at = (first.suspect_at or 0.0) + d.policy.failure_grace_s
    d.reason = f"waits for evidence on the error of {names(suspects)}"
    if not d.due(judged_at):
        return True
    silent = [w for w in members if w is not first and w.heard_at < judged_at]
    if silent:
        d.reason += f": not heard since is {names(silent)}"
        return True
    for suspect in suspects:
        d.effects.append(t.ConfirmOwnError(suspect.id, d.generation))
        d.put(suspect, confirmed_at=d.now)
        d.due(d.now + d.policy.regroup_timeout_s)
    d.reason = f"the error of {names(suspects)} is its own: all others are alive"
    return True


def _stop_if_stuck(d: Draft, suspects: list[Worker]) -> bool:
    """Whoever was told to raise its own error and does not exit is killed: the others cannot wait for ever."""
    limit_s = d.policy.regroup_timeout_s
    stuck = [w for w in suspects if w.confirmed_at is not None and d.due(w.confirmed_at + limit_s)]
    for worker in stuck:
        stop(d, worker, f"has not exited within {limit_s:g} s after its own error", kill=True)
    if stuck:
        cause = d.root_cause(stuck[0], f"{stuck[0].id} had an error of its own", stuck[0].suspect_error)
        d.account(own_errors=d.ledger.own_errors + len(stuck), own_error=d.ledger.own_error or cause)
        end_now(d, Failure(cause, "own", own_error=True))
    return True
