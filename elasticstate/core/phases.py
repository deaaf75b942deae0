"""The rules of the phases Waiting, Forming, Running, Finishing and Stopping, and how a generation ends.

Ready workers form a world; it trains; then its members regroup, by plan or after a failure, or they pass the exit gate,
or are stopped. Worlds of plain workers have rules of their own (plain.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import inf

from elasticstate.core import accounting, event_file, health, links, slots, types as t
from elasticstate.core.commits import NOTHING, awaited, check_commits, has_job_state, newest
from elasticstate.core.diagnostics import leavers, missing, names, spares_text
from elasticstate.core.divergence import reject_unequal
from elasticstate.core.sharded import awaited_copies, exiting, find_line, hosts_of, is_sharded
from elasticstate.core.state import (
    NEW_SLOT,
    Draft,
    Failure,
    Finishing,
    Forming,
    Over,
    Running,
    Stall,
    Stopping,
    Waiting,
    Worker,
    is_live,
)
from elasticstate.core.types import exception_line, listed, number_of
from elasticstate.core.worlds import (
    candidates,
    choose,
    durable_source,
    enter,
    make_world,
    may_hold_more,
    postponed,
    resumes_from_copy,
    staying,
)

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
        found = earlier(found, slot.misfit)
    return found


def of_all_free_slots(d: Draft) -> t.RootCause | None:
    """Return why no free slot can help a job with too few workers: new processes in all of them could not load its
    state, repeatedly. None if that is not so."""
    free = [slot for slot in d.slots.values() if slot.worker is None and not slot.finished]
    found: t.RootCause | None = None
    for slot in free:
        if not slot.barred and (slot.misfit is None or slot.failures < slots.FAILURES_IN_A_ROW):
            return None
        found = earlier(found, slot.misfit) if slot.misfit is not None else found
    return None if d.booting else found


def _last_line(cause: t.RootCause) -> str:
    lines = [line for line in cause.error.splitlines() if _ERROR in line]
    return lines[-1].strip() if lines else cause.reason


# ------------------------------------------------------------------------------------------------- Waiting and Forming
# Too few workers are READY, or a newer commit is awaited. A new world ends these phases.


def waiting(d: Draft, phase: Waiting, is_round: bool) -> None:
    """Rule of the phase Waiting. ``is_round``: the workers may be plain, and run together, with no time limit."""
    reject_unequal(d)
    policy = d.policy
    stay = staying(d)
    _release_draining(d, stay)
    enough = len(stay) >= policy.fewest(d.generation)
    if not enough:
        _await_retained(d, None)
        if d.generation and (misfit := of_all_free_slots(d)) is not None:
            reason = f"{policy.fewest_text(d.generation)}, and no new process can load the state of the job"
            fail_job(d, reason, misfit)
            return
    d.reason = f"{number_of(len(stay), 'worker')} ready, {policy.fewest_text(d.generation)}"
    if enough and d.now >= _window_end(d, stay) and form(d):
        return
    if d.now >= _give_up_time(d, phase) and not is_round:
        if not (enough and (form(d) or _waiting(d).retained_since is not None)):
            option, limit_s = (
                ("elastic", policy.elastic_timeout_s) if d.generation else ("start", policy.start_timeout_s)
            )
            reason = f"--{option}-timeout of {limit_s:g} s expired: {d.reason}"
            who = listed(list(missing(d, d.now)), "; ")
            help = f". {remedy}" if (remedy := links.remedy(d)) else ""
            fail_job(d, f"{reason}; missing: {who}{help}", d.ledger.outage, own_error=False)
    elif not phase.noticed and d.now >= phase.since + policy.waiting_notice_s:
        fewest = number_of(policy.fewest(d.generation), "ready worker")
        d.note_waiting(f"at least {fewest}", listed(list(missing(d, d.now)), "; "), links.remedy(d))
        d.phase = replace(_waiting(d), noticed=True)


def waiting_deadlines(d: Draft, phase: Waiting) -> Iterator[tuple[str, float]]:
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
        fail_job(d, reason, d.ledger.outage, own_error=False)
    else:
        if lost:
            d.warn(f"no host holds a commit any more; {_last_seen(d)}; the job resumes from the newest durable copy")
        become_running(d, chosen)
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
        become_running(d, chosen, *found)
        return True
    reason = "no commit is left of which all shards can be read"
    reason += f"; {_too_late(d)}: {_missing_shards(awaited_)}" if awaited_ else ""
    reason += f"; {_last_seen(d)}"
    if durable_source(d) is not None:
        d.warn(f"{reason}; the job resumes from the newest durable copy")
        become_running(d, chosen)
        return True
    fail_job(d, f"StateLostError: {reason}", d.ledger.outage, own_error=False)
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
            d.note_waiting(f"the end of generation {phase.ended}", names(awaited))
            d.phase = replace(phase, noticed=True)
        if is_live(d) and phase.clock is None:
            health.check_ticks(d, members)
        d.reason = f"waiting for {names(awaited)} to leave generation {phase.ended}"
        return
    if phase.clock is not None and d.now < health.reports_until(d, phase.clock):
        d.reason = f"waiting for reports on the hang of generation {phase.ended}"
        return
    if links.explains_nothing_yet(d, phase):
        links.probe_all(d)
    if links.are_awaited(d, phase):
        d.reason = f"looking for a cut link: waiting for the agents of {listed(d.ledger.links.asked)}"
        return
    reject_unequal(d)
    settle(d, phase)
    if isinstance(d.phase, Forming) and (len(staying(d)) < d.policy.min_np or not form(d)):
        d.phase = Waiting(since=d.now)


def forming_deadlines(d: Draft, phase: Forming) -> Iterator[tuple[str, float]]:
    members = d.members()
    yield from drain_deadlines(d, members)
    if is_live(d):
        yield from verdict_deadlines(d, suspects_of(d, members))
        yield from health.standstill_deadlines(d)
    awaited = _awaited(members)
    yield "regroup", _regroup_end(d, phase, awaited)
    if awaited and not phase.noticed:
        yield "notice", phase.since + d.policy.waiting_notice_s
    if not awaited and phase.clock is not None:
        yield "reports on a hang", health.reports_until(d, phase.clock)
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
        end_now(d, Failure(cause, "lost"))
    elif phase.failure is not None and phase.failure.kind == "reported":
        d.phase = replace(phase, failure=Failure(cause, "lost"))
    d.note(event_file.Warning, text=reason)
    for worker in awaited:
        d.put(worker, late=True)


def _forming(d: Draft) -> Forming:
    assert isinstance(d.phase, Forming)
    return d.phase


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
        d.reason = d.reason or f"training{spares_text(d)}"
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
    newcomers, stay = candidates(d), len(members) - len(draining)
    return draining, newcomers[: max(0, d.policy.fitting(stay + len(newcomers)) - stay)]


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
        d.warn(f"no answer to a hold within {d.policy.hold_timeout_s:g} s from {names(silent)}")
        if failed == FAILED_HOLDS_IN_A_ROW:
            d.warn(f"{failed} holds in a row failed. Call commit() equally often on all ranks.")
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
    elif stall := health.overdue_stall(d, phase):
        shut_down(d, phase, stall, members)
    else:
        if phase.gate_since is None:
            health.check_ticks(d, members)
            check_commits(d, phase, members)
        phase = health.check_stalls(d, _with_notices(d, phase, members), members)
        phase = d.phase = health.check_pace(d, phase, members)
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
    yield from health.stall_deadlines(d, phase, members)
    yield from health.standstill_deadlines(d)
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
    slots.set_apart(d)
    accounting.world_changes(d, chosen, line, from_copy)
    health.report_hang(d)
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
    limit_s = d.policy.collective_timeout_s
    if phase.gate_since is None or limit_s is None:
        return inf
    outside = [member for member in members if not member.in_gate]
    return max([phase.gate_since, *(max(m.moved_at, m.reported_at - m.still_s) for m in outside)]) + limit_s


def _fail_gate(d: Draft, phase: Running, members: list[Worker]) -> None:
    outside = names([member for member in members if not member.in_gate])
    waited_s = d.now - (d.now if phase.gate_since is None else phase.gate_since)
    limit = f"--collective-timeout of {d.policy.collective_timeout_s:g} s"
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
    if d.broken:
        if phase.failure is None:
            accounting.generation_failed(d)
        known = [phase.failure] if phase.failure is not None else []
        phase = d.phase = replace(phase, failure=first_cause([*known, *d.broken]))
    failure = phase.failure
    awaited = d.members() or (leavers(d) if d.now < _awaited_until(d, phase) else [])
    if not awaited:
        cause = failure.cause if failure else None
        become_over(d, failure is None, cause, is_own(cause))
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
            health.end_stalls(d, phase)
            health.end_stragglers(d, phase)
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
            slots.stop(d, member, f"no exit within --stop-timeout of {d.policy.stop_timeout_s:g} s", kill=True)
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


QUIET_S = 1.0  # seconds after a failure in which no worker starts; the new world's first tick ends this time early


# -------------------------------------------------------------------------------------------------- ends of generations
# The entries to Forming and Over, the verdict on suspects, and the counters.


def become_over(d: Draft, succeeded: bool, cause: t.RootCause | None = None, own_error: bool = False) -> None:
    """Enter Over, from any phase. The core never leaves it. ``own_error``: the script itself has failed."""
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
    d.phase = Over(succeeded, d.now)
    health.end_standstill(d)
    d.effects.append(t.EndJob(succeeded, cause, own_error))
    d.reason = cause.reason if cause is not None else "all workers have finished"


def is_own(cause: t.RootCause | None) -> bool:
    """Return True if a worker's own exit code or exception is the cause: no signal, no lost host, no time-out."""
    return cause is not None and (cause.is_confirmed or bool(cause.exit_code))


def fail_job(d: Draft, reason: str, first: t.RootCause | None = None, own_error: bool | None = None) -> None:
    """End the job as failed. The root cause describes ``first``, the failure that came first, if it is given.

    ``own_error``: the script itself has failed; None: if ``first`` is a worker's own exit code.
    """
    own_error = is_own(first) if own_error is None else own_error
    if d.ledger.highest is not None and not _holds_a_commit(d):
        accounting.all_lost(d)
    if first is None:
        become_over(d, False, t.RootCause(reason, generation=d.generation), own_error)
    else:
        become_over(d, False, replace(first, reason=f"{reason}; first failure: {first.reason}"), own_error)


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
    """Return the earlier of two failures. The error of a collective follows from another failure; else the clocks of
    the hosts decide, and without a clock time the order of the reports."""
    if known is None or known.follows != found.follows:
        return found if known is None or known.follows else known
    return found if 0 < found.time_ns < known.time_ns else known


def first_cause(found: list[Failure]) -> Failure:
    """Return the first death, or else a cut link: it explains what workers report. Without either, return the first
    report."""
    deaths = [failure for failure in found if failure.kind in ("own", "lost")]
    first = next(iter((*deaths, *(failure for failure in found if failure.kind == "link"), *found)))
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
        health.begin_hang(d, d.members())
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
    """Replace a reported failure by the death or the cut link that explains it."""
    if phase.failure is not None and phase.failure.kind == "reported":
        cause = first_cause(found)
        if cause.kind in ("own", "lost", "link"):
            if d.ledger.outage == phase.failure.cause:
                d.update_ledger(outage=cause.cause)
            d.phase = replace(phase, failure=cause)


def settle(d: Draft, phase: Forming) -> None:
    """Count the ended generation, which all members have left. End the job if a limit is exceeded."""
    ledger, policy, failure = d.ledger, d.policy, phase.failure
    if d.world is not None and ledger.own_errors == d.world.size and ledger.own_error is not None:
        become_over(d, False, ledger.own_error, True)
        return
    if phase.ended <= ledger.settled:  # the last driver has counted it
        return
    d.update_ledger(settled=phase.ended)
    if ledger.highest is not None and ledger.highest.generation >= phase.ended:
        d.update_ledger(no_progress=0, no_progress_cause=None)
    elif failure is not None and failure.kind in ("own", "reported", "divergence"):
        d.update_ledger(no_progress=ledger.no_progress + 1, no_progress_cause=ledger.no_progress_cause or failure.cause)
    if failure is None and not policy.counts_changes:
        return
    exceeded = count_reset(d, "generation")
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


def count_reset(d: Draft, what: str) -> str:
    """Count an end of a world towards --reset-limit. Return the reason for which the job must end, or "".

    ``what``: "generation", or "world" for workers without ``run``.
    """
    policy, resets = d.policy, d.ledger.resets + 1
    d.update_ledger(resets=resets)
    if policy.reset_limit is None or resets <= policy.reset_limit:
        return ""
    have = "has" if resets == 1 else "have"
    how = "ended" if policy.counts_changes else "failed"
    return f"reset limit: {number_of(resets, what)} {have} {how}, --reset-limit is {policy.reset_limit}"


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
        slots.stop(d, worker, f"{worker.draining}; not drained within --drain-timeout of {limit_s:g} s", overdue=True)
    if is_live(d):
        reason = f"{names(overdue)} did not drain within --drain-timeout of {limit_s:g} s"
        warn_of_end(d, reason)
        end_now(d, Failure(t.RootCause(reason, generation=d.generation), "drain"))


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
        slots.stop(
            d, worker, f"no exit within --regroup-timeout of {limit_s:g} s after its own error", kill=True, overdue=True
        )
    if stuck:
        cause = d.root_cause(stuck[0], f"{stuck[0].id} failed with its own error", stuck[0].suspect_error)
        cause = replace(cause, is_confirmed=True)
        error = exception_line(cause.error)
        unended = f"{names(stuck)} failed with an error, and did not exit within --regroup-timeout of {limit_s:g} s"
        warn_of_end(d, f"{unended}{error and f': {error}'}")
        d.update_ledger(own_errors=d.ledger.own_errors + len(stuck), own_error=d.ledger.own_error or cause)
        end_now(d, Failure(cause, "own", own_error=True))


def shut_down(d: Draft, phase: Running, stall: Stall, members: list[Worker]) -> None:
    """End the job as failed, because of a stall."""
    inside = health.waiting_in_calls(members).get(stall.call, [])
    missing = health.absent(inside, members)
    limit_s = d.policy.stall_shutdown_s
    reason = (
        f"stall: {stall.text} was not made on all ranks within --stall-shutdown-time of {limit_s:g} s; missing: "
        f"{health.absent_text(missing)}"
    )
    for each in phase.stalls:
        health.note_stall_end(d, each, "--stall-shutdown-time")
    d.phase = replace(phase, stalls=())
    cause = t.RootCause(reason, generation=d.generation)
    become_over(d, False, d.root_cause(missing[0], reason) if missing else cause)
