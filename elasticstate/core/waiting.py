"""The phase Waiting: too few workers are READY, or a newer commit is awaited. A new world ends this phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import inf

from elasticstate.core import event_file, links, plain, running, slots, types as t
from elasticstate.core.commits import NOTHING, awaited, has_job_state, newest
from elasticstate.core.diagnostics import missing, names
from elasticstate.core.divergence import reject_unequal
from elasticstate.core.health import check_ticks, reports_until, standstill_deadlines
from elasticstate.core.sharded import awaited_copies, exiting, find_line, hosts_of, is_sharded
from elasticstate.core.state import NEW_SLOT, Draft, Failure, Forming, Waiting, Worker, is_live
from elasticstate.core.types import listed, number_of
from elasticstate.core.worlds import choose, durable_source, may_hold_more, postponed, staying

# -------------------------------------------------------------------------------------------------------------- misfits
# Misfits: new processes that cannot load the state of the job, because the training has changed its structure
# (docs/decisions/restore-and-sync.md). An older commit, which may fit, would be a loss that nobody has asked for.


_ERROR = "StateMisfitError"  # in the traceback of such a worker: see errors.py


def worker_failed(d: Draft, worker: Worker, cause: t.RootCause) -> None:
    """Record whether a worker has failed because it could not load the state of the job."""
    is_new = not worker.joined or (worker.lacked and worker.joined == worker.first_joined)
    is_misfit = is_new and bool(cause.exit_code) and _ERROR in cause.error
    slot_id = worker.id.slot_id
    if is_misfit or d.slots[slot_id].misfit is not None:
        d.put_slot(slot_id, misfit=cause if is_misfit else None)
    if is_misfit and worker.joined and d.ledger.highest is not None:  # else all have the same structure from the start
        _bar(d, worker.id.host, cause)


def _bar(d: Draft, host: str, cause: t.RootCause) -> None:
    """Start no more workers in the slots of a host that have no member, and stop those that were in no world yet."""
    barred = []
    for index in range(d.hosts[host].slots_ever):
        slot_id = t.SlotId(host, index)
        slot = d.slots.get(slot_id, NEW_SLOT)
        worker = d.workers.get(slot.worker) if slot.worker is not None else None
        if worker is None or not worker.joined:
            d.put_slot(slot_id, barred=True)
            barred.append(slot_id)
        if worker is not None and not worker.joined and not worker.gone:
            slots.stop(d, worker, "it could not load the state of the job")
    noun = "slot" if len(barred) == 1 else "slots"
    d.warn(
        f"{noun} {listed(map(str, barred))}: no worker is started there any more, because a new one could not load "
        f"the state of the job: {_last_line(cause)}"
    )


def of_newest_commit(d: Draft) -> t.RootCause | None:
    """Return why the newest commit cannot be loaded by any new process; None if it can, or if that is not known."""
    if all(slot.misfit is None for slot in d.slots.values()) or any(has_job_state(d, w) for w in d.workers.values()):
        return None
    newest = max((slot.retained for slot in d.slots.values() if slot.retained is not None), default=None)
    if newest is None:
        return None
    holders = [slot for slot in d.slots.values() if slot.retained == newest]
    ready = [worker.ready.commit for worker in d.workers.values() if worker.ready is not None and not worker.gone]
    if any(commit is not None and commit >= newest for commit in ready):
        return None
    found: t.RootCause | None = None
    for slot in holders:
        if slot.misfit is None:
            return None
        found = running.earlier(found, slot.misfit)
    return found


def of_all_free_slots(d: Draft) -> t.RootCause | None:
    """Return why no free slot can help a job with too few workers: new processes in all of them could not load its
    state, repeatedly. None if that is not so."""
    free = [slot for slot in d.slots.values() if slot.worker is None and not slot.finished]
    found: t.RootCause | None = None
    for slot in free:
        if not slot.barred and (slot.misfit is None or slot.failures < slots.FAILURES_IN_A_ROW):
            return None
        found = running.earlier(found, slot.misfit) if slot.misfit is not None else found
    return None if d.booting else found


def _last_line(cause: t.RootCause) -> str:
    lines = [line for line in cause.error.splitlines() if _ERROR in line]
    return lines[-1].strip() if lines else cause.reason


def waiting(d: Draft, phase: Waiting) -> None:
    if d.broken and d.ledger.outage is None:
        d.update_ledger(outage=d.broken[0].cause)
    if reason := plain.mixture(d):
        running.fail_job(d, reason, own_error=True)
    elif d.ledger.kind == "plain":
        plain.waiting_plain(d, phase)
    elif plain.has_finished(d):
        running.become_over(d, True)
    elif (misfit := of_newest_commit(d)) is not None:
        running.fail_job(d, "the newest commit does not fit the objects of a new process", misfit)
    elif d.generation == 0 and not plain.restarts_are_limited(d) and every_worker_failed(d):
        running.fail_job(d, "every worker failed before the first world", d.ledger.outage)
    elif d.generation == 0 and not plain.restarts_are_limited(d) and (bad := failed_slots(d)):
        times = f"{d.policy.max_no_progress} times in a row"
        reason = f"{number_of(bad, 'slot')} failed {times} before the first world"
        running.fail_job(d, reason, d.ledger.outage)
    elif not plain.first_rounds(d):
        _wait_for_a_world(d, phase)


def _wait_for_a_world(d: Draft, phase: Waiting) -> None:
    reject_unequal(d)
    policy = d.policy
    stay = staying(d)
    _release_draining(d, stay)
    enough = len(stay) >= policy.fewest(d.generation)
    if not enough:
        _await_retained(d, None)
        if d.generation and (misfit := of_all_free_slots(d)) is not None:
            reason = f"{policy.fewest_text(d.generation)}, and no new process can load the state of the job"
            running.fail_job(d, reason, misfit)
            return
    d.reason = f"{number_of(len(stay), 'worker')} ready, {policy.fewest_text(d.generation)}"
    if enough and d.now >= _window_end(d, stay) and form(d):
        return
    if d.now >= _give_up_time(d, phase) and not plain.is_running(d):
        if not (enough and (form(d) or _waiting(d).retained_since is not None)):
            option, limit_s = (
                ("elastic", policy.elastic_timeout_s) if d.generation else ("start", policy.start_timeout_s)
            )
            reason = f"--{option}-timeout of {limit_s:g} s expired: {d.reason}"
            who = listed(list(missing(d, d.now)), "; ")
            help = f". {remedy}" if (remedy := links.remedy(d)) else ""
            running.fail_job(d, f"{reason}; missing: {who}{help}", d.ledger.outage, own_error=False)
    elif not phase.noticed and d.now >= phase.since + policy.waiting_notice_s:
        fewest = number_of(policy.fewest(d.generation), "ready worker")
        d.note_waiting(f"at least {fewest}", listed(list(missing(d, d.now)), "; "), links.remedy(d))
        d.phase = replace(_waiting(d), noticed=True)


def waiting_deadlines(d: Draft, phase: Waiting) -> Iterator[tuple[str, float]]:
    if d.ledger.kind == "plain":
        yield from plain.waiting_plain_deadlines(d, phase)
        return
    yield from plain.round_deadlines(d)
    yield "give up", _give_up_time(d, phase)
    if not phase.noticed:
        yield "notice", phase.since + d.policy.waiting_notice_s
    stay = staying(d)
    if len(stay) < d.policy.fewest(d.generation):
        return
    window_end = _window_end(d, stay)
    yield "join window", window_end
    if d.now >= window_end:
        if is_sharded(d):
            yield "shards", _shards_until(d, phase, awaited_copies(d), exiting(d))
        else:
            yield "retained commit", _retained_until(d, phase, awaited(d))
        if slots.may_train_on(d) or _is_lost(d, choose(d)) or is_sharded(d):
            yield "unreachable workers have given up", slots.unreachable_until(d)


def _give_up_time(d: Draft, phase: Waiting) -> float:
    """Return the time at which a job with too few workers ends."""
    if d.generation == 0:
        return (d.ledger.started_at or 0.0) + d.policy.start_timeout_s
    return phase.since + d.policy.elastic_timeout_s


def _await_retained(d: Draft, since: float | None) -> None:
    if isinstance(d.phase, Waiting) and d.phase.retained_since != since:
        d.phase = replace(d.phase, retained_since=since)


def _waiting(d: Draft) -> Waiting:
    assert isinstance(d.phase, Waiting)
    return d.phase


def form(d: Draft) -> bool:
    """Make a world of the READY workers. Return False to wait for a worker that holds, or may hold, a newer commit."""
    chosen = choose(d)
    if holders := may_hold_more(d, chosen):
        _await_retained(d, None)
        d.reason = f"waiting for {holders[0].id}, which may hold the newest commit"
        return False
    if slots.may_train_on(d):
        _await_retained(d, None)
        d.reason = f"waiting until the workers on unreachable hosts have stopped: {listed(slots.unreachable_hosts(d))}"
        return False
    if is_sharded(d):
        return _form_from_line(d, chosen)
    held = awaited(d)
    if held and isinstance(d.phase, Waiting) and d.phase.retained_since is None:
        _await_retained(d, d.now)
    if held and not (isinstance(d.phase, Waiting) and d.now >= _retained_until(d, d.phase, held)):
        d.reason = f"waiting for {held[0][0]}, which retains the newest commit {held[0][1]}"
        return False
    lost = _is_lost(d, chosen)
    if lost and (hosts := slots.unreachable_hosts(d)):
        d.reason = f"waiting for unreachable hosts, which may hold the only commits: {listed(hosts)}"
        return False
    for slot_id, commit in held:
        late = f"no worker of the slot was ready within --regroup-timeout of {d.policy.regroup_timeout_s:g} s"
        d.warn(f"retained commit {commit} of {slot_id} is given up: {late}")
    if lost and durable_source(d) is None:
        reason = f"StateLostError: no host holds a commit any more; {_last_seen(d)}"
        running.fail_job(d, reason, d.ledger.outage, own_error=False)
    else:
        if lost:
            d.warn(f"no host holds a commit any more; {_last_seen(d)}; the job resumes from the newest durable copy")
        running.become_running(d, chosen)
    return True


def _form_from_line(d: Draft, chosen: list[Worker]) -> bool:
    """Make a world of ``chosen`` from the commit line. Return False to wait for hosts that hold shards of a newer one.

    If no commit is reachable, and no awaited host has returned in time, a durable copy decides; without one the job
    ends.
    """
    awaited_, ends = awaited_copies(d), exiting(d)
    if (awaited_ or ends) and isinstance(d.phase, Waiting) and d.phase.retained_since is None:
        _await_retained(d, d.now)
    has_waited = isinstance(d.phase, Waiting) and d.now >= _shards_until(d, d.phase, awaited_, ends)
    if (awaited_ or ends) and not has_waited:
        d.reason = f"waiting for {_missing_shards(awaited_) if awaited_ else f'the exit of {names(ends)}'}"
        return False
    found = find_line(d)
    if found is None and (hosts := slots.unreachable_hosts(d)):
        d.reason = f"waiting for unreachable hosts, which may hold the only commits: {listed(hosts)}"
        return False
    if found is not None:
        if awaited_:
            d.warn(f"{_missing_shards(awaited_)} is given up for {found[0]}: {_too_late(d)}")
        running.become_running(d, chosen, *found)
        return True
    reason = "no commit is left of which all shards can be read"
    reason += f"; {_too_late(d)}: {_missing_shards(awaited_)}" if awaited_ else ""
    reason += f"; {_last_seen(d)}"
    if durable_source(d) is not None:
        d.warn(f"{reason}; the job resumes from the newest durable copy")
        running.become_running(d, chosen)
        return True
    running.fail_job(d, f"StateLostError: {reason}", d.ledger.outage, own_error=False)
    return True


def _last_seen(d: Draft) -> str:
    """Return which commit was the newest, and which hosts held it, or their parts of it."""
    commit = d.shards.line if d.shards.line is not None else d.ledger.highest
    hosts = sorted({slot_id.host for slot_id, slot in d.slots.items() if commit is not None and slot.sealed >= commit})
    return f"the newest commit was {commit}" + (f", on {listed(hosts)}" if hosts else "")


def _missing_shards(copies: list[t.CopyOf]) -> str:
    slots = listed([str(slot_id) for slot_id in dict.fromkeys(copy.slot for copy in copies)])
    hosts = hosts_of(copies)
    return (
        f"{'host' if len(hosts) == 1 else 'hosts'} {listed(hosts)} with shards of commit {copies[0].commit} ({slots})"
    )


def _too_late(d: Draft) -> str:
    """Return how long the core has waited for shards, and which times it has waited for."""
    waited_s = d.now - d.phase.since if isinstance(d.phase, Waiting) else 0.0
    times = f"--regroup-timeout is {d.policy.regroup_timeout_s:g} s"
    if slots.unreachable_until(d) > -inf:
        times += f"; workers on unreachable hosts may live on for {slots.lease_s(d.policy):g} s"
    return f"not back within {waited_s:.1f} s ({times})"


def _shards_until(d: Draft, phase: Waiting, copies: list[t.CopyOf], ends: list[Worker]) -> float:
    """Return the time until which the core waits for hosts with shards of a newer commit than the line, and for the
    ``ends`` of workers."""
    if not (copies or ends) or phase.retained_since is None:
        return inf
    return phase.retained_since + d.policy.regroup_timeout_s


def _retained_until(d: Draft, phase: Waiting, slots: list[tuple[t.SlotId, t.CommitId]]) -> float:
    """Return the time until which the core waits for slots with a newer retained commit, once enough others are READY.

    An older commit is better than a longer wait. But if the others hold none, a longer wait for a booting worker is
    better than no commit at all.
    """
    if not slots or phase.retained_since is None:
        return inf
    until = phase.retained_since + d.policy.regroup_timeout_s
    slot_ids = {slot_id for slot_id, _ in slots}
    booting = (
        w for w in d.workers.values() if not w.joined and w.ready is None and not w.gone
    )  # also those that drain
    boots = any(worker.id.slot_id in slot_ids for worker in booting)
    lost = _is_lost(d, staying(d))
    return max(until, phase.since + d.policy.elastic_timeout_s) if boots and lost else until


def _is_lost(d: Draft, workers: list[Worker]) -> bool:
    """Return True if the job has made a commit, and none of these workers holds one."""
    return d.ledger.highest is not None and newest(workers) == NOTHING


def _window_end(d: Draft, stay: list[Worker]) -> float:
    """Return the time until which READY workers wait for others, if they are enough but fewer than np."""
    if len(stay) >= d.policy.np or (d.generation and not d.booting):
        return -inf
    ready_at = sorted(worker.ready_at for worker in stay)
    return ready_at[d.policy.fewest(d.generation) - 1 if d.generation else -1] + d.policy.join_window_s


def _release_draining(d: Draft, stay: list[Worker]) -> None:
    """Send LEAVE to READY draining workers, except the holder of the newest commit."""
    if not d.draining:
        return
    holder = postponed(d, stay)
    for worker in list(d.ready_workers()):
        if worker.draining and worker is not holder:
            slots.leave(d, worker)


def every_worker_failed(d: Draft) -> bool:
    """Return True if the script fails wherever it runs, so that a restart cannot help (docs/decisions/restarts.md)."""
    if d.ledger.ever_ready or len(d.slots) < d.policy.np:
        return False
    first = islice(d.slots.values(), d.policy.max_np)  # in the order of their first workers
    return all(slot.failure is not None and bool(slot.failure.exit_code) for slot in first)


def failed_slots(d: Draft) -> int:
    """Return the number of slots that have failed too often before the first world, if too few others are left."""
    if not any(slot.failures >= d.policy.max_no_progress for slot in d.slots.values()):
        return 0
    slot_ids = [t.SlotId(host.name, index) for host in d.hosts.values() for index in range(host.slots)]
    slots = [d.slots[slot_id] for slot_id in slot_ids if slot_id in d.slots]
    bad = sum(slot.failures >= d.policy.max_no_progress for slot in slots)
    return bad if len(slot_ids) - bad < d.policy.fewest(d.generation) else 0


def forming(d: Draft, phase: Forming) -> None:
    members = d.members()
    if d.broken:
        if is_live(d) and any(member.ready is None for member in members):
            running.end_now(d, running.first_cause(d.broken))
        else:
            running.refine(d, phase, d.broken)
    elif is_live(d) and members and all(member.in_gate for member in members):
        running.become_finishing(d)  # train has returned on all members before tick K: no member is left to interrupt
        return
    if overdue := running.overdue_drains(d, members):
        running.fail_drains(d, overdue)
        members = d.members()
    if is_live(d) and (suspects := running.suspects_of(d, members)):
        running.judge(d, members, suspects)
        members = d.members()
    phase, awaited = _forming(d), _awaited(members)
    if d.now >= _regroup_end(d, phase, awaited):
        _give_up(d, phase, awaited)
        phase, awaited = _forming(d), []
    if awaited:
        if not phase.noticed and d.now >= phase.since + d.policy.waiting_notice_s:
            d.note_waiting(f"the end of generation {phase.ended}", names(awaited))
            d.phase = replace(phase, noticed=True)
        if is_live(d) and phase.clock is None:
            check_ticks(d, members)
        d.reason = f"waiting for {names(awaited)} to leave generation {phase.ended}"
        return
    if phase.clock is not None and d.now < reports_until(d, phase.clock):
        d.reason = f"waiting for reports on the hang of generation {phase.ended}"
        return
    if links.explains_nothing_yet(d, phase):
        links.probe_all(d)
    if links.are_awaited(d, phase):
        d.reason = f"looking for a cut link: waiting for the agents of {listed(d.ledger.links.asked)}"
        return
    reject_unequal(d)
    running.settle(d, phase)
    if isinstance(d.phase, Forming) and (len(staying(d)) < d.policy.min_np or not form(d)):
        d.phase = Waiting(since=d.now)


def forming_deadlines(d: Draft, phase: Forming) -> Iterator[tuple[str, float]]:
    members = d.members()
    yield from running.drain_deadlines(d, members)
    if is_live(d):
        yield from running.verdict_deadlines(d, running.suspects_of(d, members))
        yield from standstill_deadlines(d)
    awaited = _awaited(members)
    yield "regroup", _regroup_end(d, phase, awaited)
    if awaited and not phase.noticed:
        yield "notice", phase.since + d.policy.waiting_notice_s
    if not awaited and phase.clock is not None:
        yield "reports on a hang", reports_until(d, phase.clock)
    if links.are_awaited(d, phase):
        yield "probes", links.answers_until(d)


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
        running.end_now(d, Failure(cause, "lost"))
    elif phase.failure is not None and phase.failure.kind == "reported":
        d.phase = replace(phase, failure=Failure(cause, "lost"))
    d.note(event_file.Warning, text=reason)
    for worker in awaited:
        d.put(worker, late=True)


def _forming(d: Draft) -> Forming:
    assert isinstance(d.phase, Forming)
    return d.phase
