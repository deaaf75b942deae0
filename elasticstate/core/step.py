"""The core's interface: ``step(membership, event, now)`` decides. Pure, total, deterministic; no clock, socket, thread.

::

    m = new_membership(policy)
    m, effects, reason = step(m, HostsDiscovered(...), now)      # carry the effects out, in their order
    ...
    step(m, TimePassed(), next_deadline(m))                      # when nothing else has happened by then

A step enters the event's facts into the state and then takes one decision. Its time is linear in the number of slots
and independent of the number of events in the step: send events that arrived together as Several.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

from elasticstate.core import (
    accounting,
    commits,
    event_file,
    health,
    links,
    phases,
    plain,
    sharded,
    slots,
    types as t,
)
from elasticstate.core.divergence import answered, compare, comparison_deadlines, digests_reported, kept_digests
from elasticstate.core.figures import TimeAccount
from elasticstate.core.policy import Policy
from elasticstate.core.state import (
    Count,
    Draft,
    Failure,
    Finishing,
    Forming,
    Ledger,
    Membership,
    Over,
    Running,
    Stopping,
    Together,
    Waiting,
    Worker,
    fields_of,
    is_live,
)
from elasticstate.core.types import number_of
from elasticstate.failures import how_it_ended, signal_name


class Transition(NamedTuple):
    """Result of a step: the state after the step, the effects to carry out in this order, and the reason as a text."""

    next: Membership
    effects: tuple[t.Effect, ...]
    reason: str


def new_membership(policy: Policy, began_at: float | None = None) -> Membership:
    """Return a state without hosts, slots and workers. The start time-out counts from the first step.

    ``began_at``: the account of time begins here; None: with the first step.
    """
    ledger = Ledger(account=TimeAccount(since=began_at))
    return Membership(policy, Waiting(since=0.0), {}, {}, {}, None, ledger, {}, Count(), {}, t.Shards())


def step(m: Membership, event: t.Event, now: float) -> Transition:
    """Enter the event, then take one decision. ``now`` is the time of a monotonic clock, in seconds."""
    if isinstance(m.phase, Over):
        return Transition(m, (), "the job is over")
    d = Draft(m, now)
    if d.ledger.started_at is None:
        d.update_ledger(started_at=now)
        d.phase = Waiting(since=now)
        d.update_ledger(account=d.ledger.account.until(now))
    apply(d, event)
    compare(d)
    slots.mark_draining(d)
    slots.stop_overdue_boots(d)
    phase = d.phase
    decide(d)
    if d.phase is not phase:  # in a generation that has ended, nobody answers for the workers that differ
        compare(d)
    slots.start_and_stop(d)
    sharded.replicate(d)
    links.probe(d)
    accounting.follow(d)
    return Transition(d.freeze(_deadlines(d)), tuple(d.effects), d.reason)


def _deadlines(d: Draft) -> dict[str, float]:
    """Return the future deadlines, by name."""
    named = itertools.chain(
        deadlines_of_phase(d),
        slots.slot_deadlines(d),
        sharded.replication_deadlines(d),
        links.link_deadlines(d),
        comparison_deadlines(d),
    )
    return {name: at for name, at in named if d.now < at < inf}


def next_deadline(m: Membership) -> float | None:
    """Return the earliest time at which TimePassed may change the state; None: only another event can change it."""
    return min(m.deadlines.values(), default=None)


# ---------------------------------------------------------------------------------------------------------------- rules
# The decisions: one rule per phase (the form of etcd's raft), in the modules of the phases. A rule
# compares the draft and the time with its conditions, makes the first transition that applies, and writes the reason
# to ``d.reason``. Beside each rule, a function yields the deadlines of its phase. A rule and its deadlines use
# the same predicates, so TimePassed at a deadline changes the rule's result.


def decide(d: Draft) -> None:
    """Apply the rule of the phase until the phase does not change any more."""
    if d.stopped_by:
        phases.stop_job(d, d.stopped_by)
    while True:
        before = d.phase
        match before:
            case Waiting():
                _waiting(d, before)
            case Forming():
                phases.forming(d, before)
            case Running():
                phases.running(d, before)
                if isinstance(d.phase, Forming | Finishing):
                    health.end_stalls(d, before)
                    health.end_stragglers(d, before)
            case Stopping():
                phases.stopping(d, before)
            case Finishing():
                phases.finishing(d, before)
            case Together():
                plain.together(d, before)
            case Over():
                return
        health.end_standstill(d)
        d.broken = []
        if d.phase is before:
            return


def _waiting(d: Draft, phase: Waiting) -> None:
    """Apply the rule of the phase Waiting for a command that is plain or not, or whose kind is unknown yet."""
    if d.broken and d.ledger.outage is None:
        d.update_ledger(outage=d.broken[0].cause)
    if reason := plain.mixture(d):
        phases.fail_job(d, reason, own_error=True)
    elif d.ledger.kind == "plain":
        plain.waiting_plain(d, phase)
    elif plain.has_finished(d):
        phases.become_over(d, True)
    elif (misfit := phases.of_newest_commit(d)) is not None:
        phases.fail_job(d, "the newest commit does not fit the objects of a new process", misfit)
    elif d.generation == 0 and not plain.restarts_are_limited(d) and phases.every_worker_failed(d):
        phases.fail_job(d, "every worker failed before the first world", d.ledger.outage)
    elif d.generation == 0 and not plain.restarts_are_limited(d) and (bad := phases.failed_slots(d)):
        times = f"{d.policy.max_no_progress} times in a row"
        reason = f"{number_of(bad, 'slot')} failed {times} before the first world"
        phases.fail_job(d, reason, d.ledger.outage)
    elif not plain.first_rounds(d):
        phases.waiting(d, phase, plain.is_running(d))


def deadlines_of_phase(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the times, by name, at which the rule of the present phase may decide otherwise; some may have passed."""
    match d.phase:
        case Waiting():
            if d.ledger.kind == "plain":
                yield from plain.waiting_plain_deadlines(d, d.phase)
            else:
                yield from plain.round_deadlines(d)
                yield from phases.waiting_deadlines(d, d.phase)
        case Forming():
            yield from phases.forming_deadlines(d, d.phase)
        case Running():
            yield from phases.running_deadlines(d, d.phase)
        case Stopping():
            yield from phases.stopping_deadlines(d, d.phase)
        case Finishing():
            yield from phases.finishing_deadlines(d, d.phase)
        case Together():
            yield from plain.round_deadlines(d)


# ---------------------------------------------------------------------------------------------------------------- facts
# State changes by events: no decisions, but the ends of a generation's members are collected. An unknown, stale or
# impossible event has no effect (I1): about a worker that is not alive, an older incarnation, another generation, or
# in an impossible order.


_CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT))
"""Signals by which a process ends itself: an error of the script. Others come from outside."""

EXIT_0 = "exited with 0 without returning from train"


def apply(d: Draft, event: t.Event) -> None:
    """Enter one event into the draft."""
    match event:
        case t.FromWorker(worker, body):
            _reported(d, worker, body)
        case t.WorkerExited():
            _worker_exited(d, event)
        case t.WorkerUnresponsive():
            _worker_unresponsive(d, event)
        case t.WorkerUsesRun():
            plain.run_used(d, event.worker)
        case t.PlainStoreJoined():
            plain.store_joined(d, event)
        case t.CopyKept():
            sharded.copy_kept(d, event)
        case t.CopyDropped():
            sharded.copy_dropped(d, event)
        case t.DurableCopySaved(commit):
            d.update_ledger(durable=commit)
        case t.CommitDamaged():
            commits.commit_damaged(d, event)
        case t.HostsDiscovered():
            slots.hosts_discovered(d, event)
        case t.AgentJoined():
            _agent_joined(d, event)
        case t.AgentLost():
            _agent_lost(d, event)
        case t.HostDraining():
            _host_draining(d, event)
        case t.LinksProbed():
            links.probed(d, event)
        case t.HealthChecked():
            slots.health_checked(d, event)
        case t.StopRequested(by):
            d.stopped_by = by
        case t.Several():
            for each in event.events:
                apply(d, each)
        case t.TimePassed():
            pass


def _reported(d: Draft, name: t.WorkerId, report: t.Report | t.Stamp) -> None:
    """Enter one report of a worker."""
    if isinstance(report, t.Attached):
        sharded.shards_attached(d, name, report)  # the worker may have died since then
        return
    worker = d.workers.get(name)
    if worker is None:
        return
    match report:
        case t.Stamp():
            _stamp(d, worker, report)
        case t.CommitSealed(commit):
            _commit_sealed(d, worker, commit)
        case t.Ready():
            _ready(d, worker, report)
        case t.WorkerPreemptionNotice(number):
            if not worker.draining and not worker.gone:
                reason = f"preemption notice: {signal_name(number)} to the worker"
                d.put(worker, draining=reason, draining_since=d.now)
        case t.CommitDigests(generation, digests):
            if worker.joined == generation == d.generation:
                d.put(worker, digests=kept_digests(worker, digests))
                digests_reported(d, worker, digests)
        case t.CollectivesReport():
            health.collectives_reported(d, worker, report)
            health.where_reported(d, worker, report)
        case _ if not _takes_part(d, worker, report.generation):
            pass
        case t.HoldAnswer():
            _hold_answered(d, worker, report)
        case t.GenerationFailure():
            _generation_failed(d, worker, report)
        case t.DigestAnswer():
            answered(d, worker, report)
        case t.Gate():
            _gate_entered(d, worker, report)
        case t.First():
            _first_tick(d, report)
        case t.CallReport():
            health.call_reported(d, worker, report)


# ------------------------------------------------------------------------------------------------ hosts and agents


def _agent_joined(d: Draft, event: t.AgentJoined) -> None:
    host = d.hosts.get(event.host)
    if host is None or host.agent == "stopping":  # an unreachable agent has returned in the other's place
        d.effects.append(t.StopAgent(event.host, "the job does not need the host any more"))
    if host is None or host.agent not in ("asked", "none"):
        return
    d.put_host(host, agent="joined", may_live_until=-inf, report="agent connected", reported_at=d.now, loss="")
    commits.replace_commits(d, host.name, dict(event.commits), dict(event.previous))
    sharded.host_reports(d, host.name, event.kept)
    d.note(event_file.AgentJoined, host=host.name)
    for worker in (*(t.WorkerId(host.name, *known) for known in event.incarnations), *(w for w, _ in event.workers)):
        slots.record_incarnation(d, worker)
    had_members = d.world is not None and any(place.worker.host == host.name for place in d.world.members)
    if had_members and host.may_live_until > -inf and not event.workers:
        d.update_ledger(is_broken=True)
    for worker, generation in event.workers:
        slots.take_back(d, worker, generation)


def _agent_lost(d: Draft, event: t.AgentLost) -> None:
    host = d.hosts.get(event.host)
    if host is None or host.agent == "none":
        return
    expected = host.agent == "stopping"
    may_live = event.may_live and not expected
    notice = host.draining
    report = notice or ("agent stopped" if expected else f"agent {event.reason}")
    loss = "" if expected or notice else event.reason
    checked = "sick" if host.health == "sick" and not expected else "unknown"
    host = d.put_host(host, agent="none", draining="", report=report, reported_at=d.now, loss=loss, health=checked)
    if not expected:
        d.note(event_file.AgentLost, host=host.name, reason=event.reason)
    workers = slots.workers_on(d, host)
    for worker in workers:
        cause = d.root_cause(
            worker, f"{worker.id} was lost with its host: the agent of host {host.name} {event.reason}"
        )
        if (d.breaks(worker) or d.in_round(worker)) and not worker.gone:
            d.broken.append(Failure(cause, "drain" if notice and d.in_round(worker) else "lost"))
        if may_live and (d.breaks(worker) or _holds_alone(d, worker)):
            host = d.put_host(host, may_live_until=d.now + slots.lease_s(d.policy))
        elif d.breaks(worker):
            d.update_ledger(is_broken=True)
        left = worker.gone == "stopped" and not worker.overdue
        _remove_worker(d, worker, None, None, expected=left or (bool(notice) and d.in_round(worker)))
    if not expected and sharded.reads_from(d, host.name):
        reason = f"host {host.name}, from which the world reads shards, was lost: its agent {event.reason}"
        d.broken.append(Failure(t.RootCause(reason, generation=d.generation), "lost"))
    sharded.host_lost(d, host.name, expected)
    links.host_lost(d, host.name)
    if expected:
        commits.replace_commits(d, host.name, {}, {})  # a stopped agent has removed its workers' commits
    else:
        slots.host_is_lost(d, d.hosts[host.name], workers, notice)
    if notice and host.slots and d.policy.listen is None:  # an agent that dials in again may work at once
        slots.start_preemption_cooldown(d, d.hosts[host.name], notice)


def _host_draining(d: Draft, event: t.HostDraining) -> None:
    host = d.hosts.get(event.host)
    if host is not None and host.agent == "joined" and not host.draining:
        d.put_host(host, draining=f"preemption notice: {event.reason}")
        d.note(event_file.HostDraining, host=host.name, reason=event.reason)


# --------------------------------------------------------------------------------------------- the ends of workers


def _worker_exited(d: Draft, event: t.WorkerExited) -> None:
    worker = d.workers.get(event.worker)
    if worker is None:
        return
    if event.commits:
        newest, previous = (*event.commits, None)[:2]
        commits.record_both(d, worker.id.slot_id, newest, previous)
    cause = _cause_of_exit(d, worker, event)
    if d.in_round(worker):
        _member_of_round_exited(d, worker, event, cause)
        return
    is_member = d.breaks(worker) and not worker.gone
    benign = worker.gone == "stopped"
    if d.breaks(worker):
        d.update_ledger(is_broken=True)
    if isinstance(d.phase, Finishing) and is_member:
        benign = event.exit_code == 0
        if not benign:
            d.broken.append(Failure(cause, "own"))
    elif worker.booting and event.exit_code == 0 and not d.generation and not worker.uses_run:
        benign = True
        d.put_slot(worker.id.slot_id, finished=True)
    elif not benign:
        if event.exit_code == 0:
            cause = replace(cause, reason=f"{worker.id} {EXIT_0}")
        benign = bool(worker.draining) and not is_member
        if is_member:
            _member_ended(d, worker, cause)
    _remove_worker(d, worker, event.exit_code, event.signal, expected=benign and not worker.overdue)
    if not benign:
        slots.slot_failed(d, worker, cause)
        phases.worker_failed(d, worker, cause)


def _member_of_round_exited(d: Draft, worker: Worker, event: t.WorkerExited, cause: t.RootCause) -> None:
    """Record the end of a worker that was started together with others."""
    is_stopped = worker.gone == "stopped"
    has_failed = not is_stopped and (worker.gone == "failed" or event.exit_code != 0)
    if d.breaks(worker):
        d.update_ledger(is_broken=True)
    if has_failed:
        own_error = cause.signal in _CRASHES if cause.signal is not None else bool(cause.exit_code)
        d.broken.append(Failure(cause, "drain" if worker.draining else "own", own_error and not worker.draining))
    elif not is_stopped:
        d.put_slot(worker.id.slot_id, finished=True)
    is_expected = not worker.overdue and (bool(worker.draining) or not has_failed)
    _remove_worker(d, worker, event.exit_code, event.signal, is_expected)
    if has_failed and not worker.draining:
        slots.slot_failed(d, worker, cause)


def _cause_of_exit(d: Draft, worker: Worker, event: t.WorkerExited) -> t.RootCause:
    if not event.pid:
        return d.root_cause(worker, f"{worker.id} {event.error or 'could not be started'}")
    how = how_it_ended(event.exit_code or 0 if event.signal is None else -event.signal)
    cause = d.root_cause(worker, f"{worker.id} {how}", event.error or worker.suspect_error)
    return replace(cause, exit_code=event.exit_code, signal=event.signal, time_ns=event.time_ns)


def _member_ended(d: Draft, worker: Worker, cause: t.RootCause) -> None:
    """Record that a member of the newest world has ended by itself."""
    own_error = worker.ready is None and bool(cause.exit_code) and cause.signal is None
    if own_error:
        d.update_ledger(own_errors=d.ledger.own_errors + 1, own_error=phases.earlier(d.ledger.own_error, cause))
    if d.ledger.outage is not None:
        d.update_ledger(outage=phases.earlier(d.ledger.outage, cause))
    d.broken.append(Failure(cause, "own", own_error))


def _holds_alone(d: Draft, worker: Worker) -> bool:
    """Return True if the slot of a worker holds a newer commit than the READY workers of all other hosts."""
    retained = d.slots[worker.id.slot_id].retained
    others = (other for other in d.ready_workers() if other.id.host != worker.id.host)
    return retained is not None and retained > commits.newest(others)


def _remove_worker(d: Draft, worker: Worker, exit_code: int | None, signal: int | None, expected: bool) -> None:
    """Remove a worker that has ended. ``expected``: it was asked to end, or has finished, so it is not lost."""
    if d.breaks(worker):
        accounting.member_died(d, worker, seen=exit_code is not None or signal is not None)
    d.remove(worker)
    d.put_slot(worker.id.slot_id, worker=None)
    d.note(
        event_file.WorkerExited,
        **fields_of(worker.id),
        rank=worker.rank,
        exit_code=exit_code,
        signal=signal,
        expected=expected,
    )


def _worker_unresponsive(d: Draft, event: t.WorkerUnresponsive) -> None:
    worker = d.workers.get(event.worker)
    if worker is None or worker.gone:
        return
    health.report_hang(d)
    d.note(event_file.WorkerUnresponsive, worker=str(worker.id), reason=event.reason)
    if isinstance(d.phase, Finishing):
        return  # the worker's exit decides
    if d.breaks(worker):
        reason = f"{worker.id} is unresponsive: {event.reason}{health.hang_text(d, worker)}"
        d.broken.append(Failure(d.root_cause(worker, reason), "own"))
    d.put(worker, gone="failed", ready=None)


# ------------------------------------------------------------------------------------------ the messages of workers


def _record_commit(d: Draft, commit: t.CommitId | None) -> None:
    is_newer = commit is not None and commit.tick >= 1 and (d.ledger.highest is None or commit > d.ledger.highest)
    if is_newer and not commits.is_rejected(d, commit):
        d.update_ledger(highest=commit)


def _stamp(d: Draft, worker: Worker, stamp: t.Stamp) -> None:
    _record_commit(d, stamp.commit)
    if stamp.commit is not None:
        commits.record_both(d, worker.id.slot_id, stamp.commit, stamp.previous)
    if worker.ready is not None or stamp.generation != worker.joined:
        d.put(worker, reported_at=d.now, place=stamp.place)
        return
    has_digests = stamp.digests and stamp.generation == d.generation
    has_moved = stamp.still_s < worker.still_s or stamp.ticks != worker.ticks or stamp.place != worker.place
    d.put(
        worker,
        reported_at=d.now,
        place=stamp.place,
        ticks=stamp.ticks,
        ticks_at=d.now if stamp.ticks != worker.ticks else worker.ticks_at,
        moved_at=max(worker.moved_at, d.now - stamp.still_s) if has_moved else worker.moved_at,
        still_s=stamp.still_s,
        commit=stamp.commit or worker.commit,
        commit_at=worker.commit_at if stamp.commit in (None, worker.commit) else d.now,
        digests=kept_digests(worker, stamp.digests) if has_digests else worker.digests,
    )
    _trains(d, worker.id, stamp.trained_s)
    if stamp.generation == d.generation:
        accounting.commit_stalled(d, stamp.commit_s)
        if stamp.commit_s and not d.ledger.commits_come:
            d.update_ledger(commits_come=True)
    if has_digests:
        digests_reported(d, d.workers[worker.id], stamp.digests)
    if stamp.pace:
        health.pace_reported(d, d.workers[worker.id], stamp.pace)


def _trains(d: Draft, name: t.WorkerId, seconds: float) -> None:
    """Record when a member began to train in its newest world. Its first report is the one that was delayed least."""
    worker = d.workers[name]
    if seconds and worker.trains_since is None:
        d.put(worker, trains_since=d.now - seconds)
        if d.breaks(worker):
            d.update_ledger(account=d.ledger.account.with_training(d.now - seconds, d.now))


def _commit_sealed(d: Draft, worker: Worker, commit: t.CommitId) -> None:
    _record_commit(d, commit)
    commits.record_first(d, worker.id.slot_id, commit)
    if worker.commit is None or worker.commit < commit:
        d.put(worker, commit=commit, commit_at=d.now)


def _ready(d: Draft, worker: Worker, ready: t.Ready) -> None:
    if worker.gone or ready.generation != worker.joined:
        return
    if isinstance(d.phase, Stopping):
        slots.stop(d, worker, "the job is being stopped, so there is no other world")
    if isinstance(d.phase, Finishing):
        return
    if not worker.uses_run:
        plain.command_uses_run(d, worker.id)
    slot_id = worker.id.slot_id
    commits.record_both(d, slot_id, ready.commit, ready.previous, ready.sealed)
    said, ready = ready, commits.without_rejected(d, ready)
    _record_commit(d, ready.commit)
    _record_commit(d, ready.previous)
    if d.slots[slot_id].misfit is not None:
        d.put_slot(slot_id, misfit=None)
    if not d.ledger.ever_ready:
        d.update_ledger(ever_ready=True)
    if worker.ready is not None:
        d.put(worker, ready=ready, said=said, commit=ready.commit, reported_at=d.now)
        return
    d.note(event_file.WorkerReady, **fields_of(worker.id))
    d.put(
        worker,
        ready=ready,
        said=said,
        ready_at=d.now,
        reported_at=d.now,
        commit=ready.commit,
        commit_at=worker.commit_at if ready.commit == worker.commit else d.now,
        uses_run=True,
        late=False,
        in_gate=False,
        suspect_at=None,
        confirmed_at=None,
    )
    _trains(d, worker.id, ready.trained_s)
    if d.breaks(worker):
        if not d.ledger.is_broken:
            d.update_ledger(is_broken=True)
        accounting.member_left(d, ready)
        match d.phase:
            case Running():
                cause = d.root_cause(worker, f"{worker.id} left generation {ready.generation}")
                d.broken.append(Failure(cause, "reported"))
            case Forming(clock=None):
                d.phase = replace(d.phase, clock=d.now)


def _takes_part(d: Draft, worker: Worker, generation: int) -> bool:
    """Return True if the worker is in ``generation`` and ``generation`` is the present one."""
    has_left = bool(worker.gone) or worker.ready is not None or worker.late
    return not has_left and worker.joined == generation == d.generation


def _hold_answered(d: Draft, worker: Worker, answer: t.HoldAnswer) -> None:
    is_held = isinstance(d.phase, Running) and d.phase.hold_since is not None
    if is_held and answer.number == d.ledger.holds:  # after an older hold the worker went on
        d.put(worker, answer=(answer.ticks, answer.in_gate), reported_at=d.now)


def _generation_failed(d: Draft, worker: Worker, failure: t.GenerationFailure) -> None:
    if not (is_live(d) or isinstance(d.phase, Stopping)):
        return  # END(now) was sent: every suspect has its answer
    if failure.certain:
        d.broken.append(_what_was_found(d, worker, failure))
        d.put(worker, reported_at=d.now)
    elif worker.suspect_at is None:
        d.put(worker, suspect_at=d.now, suspect_error=failure.error, reported_at=d.now)


def _what_was_found(d: Draft, worker: Worker, event: t.GenerationFailure) -> Failure:
    """Return the failure behind a member's report of a broken generation: the confirmed own error of another member
    that leaves, or the report itself."""
    suspects = d.workers.values() if d.suspects else ()
    confirmed = (w for w in suspects if w.confirmed_at is not None and d.breaks(w))
    first = min(confirmed, key=lambda w: (w.suspect_at or 0.0, w.id), default=None)
    if first is None and event.hang:
        return Failure(d.root_cause(worker, f"{worker.id}: {event.error}"), "reported", hang=True)
    if first is None:
        return Failure(d.root_cause(worker, f"{worker.id} reported a broken generation", event.error), "reported")
    cause = d.root_cause(first, f"{first.id} failed with its own error", first.suspect_error)
    return Failure(replace(cause, is_confirmed=True), "own")


def _gate_entered(d: Draft, worker: Worker, gate: t.Gate) -> None:
    if worker.in_gate:
        return
    d.put(worker, in_gate=True, reported_at=d.now, place=t.Place.GATE)
    accounting.commit_stalled(d, gate.commit_s)
    if isinstance(d.phase, Running) and d.phase.gate_since is None:
        d.phase = replace(d.phase, gate_since=d.now)


def _first_tick(d: Draft, first: t.First) -> None:
    if not isinstance(d.phase, Running):
        return
    d.update_ledger(account=d.ledger.account.with_first_tick(first.train_s, first.sync_s, d.now))
    if d.phase.first_tick:
        return
    d.phase = replace(d.phase, first_tick=True)
    accounting.training_resumed(d, d.now)
    d.update_ledger(quiet_until=-inf, outage=None, has_ticked=True)
