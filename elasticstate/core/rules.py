"""The decisions: one rule per phase (the form of etcd's raft); entries to Forming and Over are in ending.py.

A rule looks at the draft, changes the phase if it must, and says why in ``d.reason``. Whatever waits for time asks
``d.due(at)``, which also sets the next deadline; so TimePassed at the deadline always changes what the rules see.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elasticstate.core import types as t
from elasticstate.core.ending import (
    become_over,
    drain_is_over,
    end_now,
    fail_job,
    first_cause,
    is_live,
    refine,
    settle,
    verdict,
)
from elasticstate.core.forming import (
    NOTHING,
    choose,
    enter,
    make_world,
    may_hold_more,
    newest,
    postponed,
    staying,
    survivors_of,
    ticks_lost,
)
from elasticstate.core.memory import awaited
from elasticstate.core.missing import listed, members_of, missing, names
from elasticstate.core.planned import planned_change
from elasticstate.core.records import Draft, Failure, Finishing, Forming, Over, Running, Waiting, Worker
from elasticstate.core.seats import leave


def decide(d: Draft) -> None:
    """Follow the rules until the phase rests."""
    while True:
        before = d.phase
        match before:
            case Waiting():
                waiting(d, before)
            case Forming():
                forming(d, before)
            case Running():
                running(d, before)
            case Finishing():
                finishing(d, before)
            case Over():
                return
        d.broken = []
        if d.phase is before:
            return


# ------------------------------------------------------------------------------------------------------------ running


def running(d: Draft, phase: Running) -> None:
    members = members_of(d)
    if d.broken:
        end_now(d, first_cause(d.broken))
    elif members and all(member.in_gate for member in members):
        become_finishing(d)
    elif not drain_is_over(d, members) and not _gate_is_over(d, phase, members) and not verdict(d, members):
        _look_around(d, phase, members)
        planned_change(d, phase if phase is d.phase else _running(d), members)


def become_running(d: Draft, chosen: list[Worker]) -> None:
    """In: a world of ``chosen`` is published. Out: END at a tick or now, or the gate."""
    before = {w.id for w in chosen if 0 < w.joined == d.generation}
    left = [p.worker for p in d.world.members if p.worker not in before] if d.world is not None else []
    if d.generation > 0 and d.ledger.down_since is None:  # planned: nobody has failed since the last first tick
        paused = [d.workers[ready.worker].ready_at - ready.paused_s for ready in survivors_of(d, chosen)]
        d.account(planned_at=d.now, down_since=min(paused, default=d.now))
    elif d.generation > 0:
        d.account(ticks_lost=d.ledger.ticks_lost + ticks_lost(d, chosen))
    world = make_world(d, chosen)
    enter(d, world)
    d.effects.append(t.PublishWorld(world))
    d.note(
        "world_formed",
        size=world.size,
        hosts=world.members[0].cross_size,
        joined=[str(p.worker) for p in world.members if p.worker not in before],
        left=[str(worker) for worker in left],
        root=world.root,
        synced=len(world.lacking),
    )
    d.become(Running(since=d.now))
    d.reason = f"world {world.generation}: {world.size} workers"


def _gate_is_over(d: Draft, phase: Running, members: list[Worker]) -> bool:
    """The gate's time-out, if there is one."""
    limit_s = d.policy.gate_timeout_s
    if phase.gate_since is None or limit_s is None or not d.due(phase.gate_since + limit_s):
        return False
    outside = names([member for member in members if not member.in_gate])
    cause = t.RootCause(f"{outside} not in the exit gate within {limit_s:g} s", generation=d.generation)
    end_now(d, Failure(cause, "reported"))
    return True


def _look_around(d: Draft, phase: Running, members: list[Worker]) -> None:
    """No silent wait: who is outside the gate, and whose ticks stand still while others are ahead."""
    notice_s = d.policy.waiting_notice_s
    if phase.gate_since is not None:
        outside = names([member for member in members if not member.in_gate])
        d.reason = f"waits in the exit gate for {outside}"
        if "gate" not in phase.noticed and d.due(phase.gate_since + notice_s):
            d.note("waiting", **{"for": "the exit gate", "who": outside})
            d.phase = replace(phase, noticed=(*phase.noticed, "gate"))
    elif "ticks" not in phase.noticed:
        ahead = max(member.ticks for member in members) - 1 if members else 0
        behind = [w for w in members if w.ticks < ahead and d.due(w.ticks_at + notice_s)]
        if behind:
            d.note("waiting", **{"for": f"ticks: others have completed {ahead + 1}", "who": names(behind)})
            d.phase = replace(phase, noticed=(*phase.noticed, "ticks"))


def _running(d: Draft) -> Running:
    assert isinstance(d.phase, Running)
    return d.phase


# ------------------------------------------------------------------------------------------------------------ forming


def forming(d: Draft, phase: Forming) -> None:
    members = members_of(d)
    if d.broken:
        if is_live(d) and any(member.ready is None for member in members):
            end_now(d, first_cause(d.broken))
        else:
            refine(d, phase, d.broken)
    elif is_live(d) and members and all(member.in_gate for member in members):
        become_finishing(d)  # train has returned everywhere before tick K: nobody is left to interrupt
        return
    drained = drain_is_over(d, members)
    judged = is_live(d) and verdict(d, members)
    awaited = _awaited(members_of(d) if drained or judged else members)
    phase = _forming(d)
    if awaited and phase.clock is not None and d.due(phase.clock + d.policy.regroup_timeout_s):
        _give_up(d, phase, awaited)
        phase, awaited = _forming(d), []
    if awaited:
        if not phase.noticed and d.due(phase.since + d.policy.waiting_notice_s):
            d.note("waiting", **{"for": f"the end of generation {phase.ended}", "who": names(awaited)})
            d.phase = replace(phase, noticed=True)
        d.reason = f"waits for {names(awaited)} to leave generation {phase.ended}"
        return
    settle(d, phase)
    if isinstance(d.phase, Forming) and (len(staying(d)) < d.policy.min_np or not form(d)):
        become_waiting(d)


def _awaited(members: list[Worker]) -> list[Worker]:
    """Members that may still be READY. Who raises its own error will not be; whether all do is worth waiting for."""
    found = [w for w in members if w.ready is None and not w.late]
    if all(w.confirmed_at is not None for w in members):
        return found
    return [w for w in found if w.confirmed_at is None]


def _give_up(d: Draft, phase: Forming, awaited: list[Worker]) -> None:
    """The regroup time-out: the late ones keep their slots, and may come later, as newcomers."""
    reason = f"{names(awaited)} did not leave generation {phase.ended} within {d.policy.regroup_timeout_s:g} s"
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


# ------------------------------------------------------------------------------------------------------------ waiting


def become_waiting(d: Draft) -> None:
    """In: an ended generation leaves too few. Out: a world, or the end of the job."""
    d.become(Waiting(since=d.now))


def waiting(d: Draft, phase: Waiting) -> None:
    policy, first = d.policy, d.generation == 0
    if d.broken and d.ledger.outage is None:
        d.account(outage=d.broken[0].cause)
    if first and (_plain_commands_are_done(d) or _boots_fail(d)):
        return
    stay = staying(d)
    _let_leavers_go(d, stay)
    enough = len(stay) >= policy.min_np
    if not enough:
        _await_memory(d, None)
    d.reason = f"{len(stay)} of at least {policy.min_np} workers ready"
    if enough and (len(stay) >= policy.np or _window_is_over(d, stay, first)) and form(d):
        return
    option, limit_s = ("start", policy.start_timeout_s) if first else ("elastic", policy.elastic_timeout_s)
    if d.due((d.ledger.started_at or 0.0 if first else phase.since) + limit_s):
        if not (enough and (form(d) or _waiting(d).memory_since is not None)):
            reason = f"{d.reason} after --{option}-timeout of {limit_s:g} s"
            who = listed(list(missing(d, d.now)), "; ")
            fail_job(d, f"{reason}; missing: {who}", d.ledger.outage)
    elif not phase.noticed and d.due(phase.since + policy.waiting_notice_s):
        d.note("waiting", **{"for": d.reason, "who": listed(list(missing(d, d.now)), "; ")})
        d.phase = replace(_waiting(d), noticed=True)


def _await_memory(d: Draft, since: float | None) -> None:
    if isinstance(d.phase, Waiting) and d.phase.memory_since != since:
        d.phase = replace(d.phase, memory_since=since)


def _waiting(d: Draft) -> Waiting:
    assert isinstance(d.phase, Waiting)
    return d.phase


def form(d: Draft) -> bool:
    """Make a world of those who are there. False: somebody is awaited who holds, or may hold, the newest commit."""
    chosen = choose(d)
    if holders := may_hold_more(d, chosen):
        _await_memory(d, None)
        d.reason = f"waits for {holders[0].id}, which may hold the newest commit"
        return False
    if _may_train_on(d):
        return False
    slots = awaited(d)
    if slots and not _memory_is_given_up(d, slots):
        d.reason = f"waits for {slots[0][0]}, whose memory holds the newest commit {slots[0][1]}"
        return False
    lost = d.ledger.highest is not None and newest(chosen) == NOTHING
    if lost and (hosts := _out_of_reach(d)):
        d.reason = f"waits for {listed(hosts)}, out of reach: the workers there may hold the only commits"
        return False
    for seat, commit in slots:
        limit_s = d.policy.regroup_timeout_s
        d.warn(
            f"commit {commit} in the memory of {seat} is given up: not back within --regroup-timeout of {limit_s:g} s"
        )
    if lost:
        reason = f"StateLostError: the job has committed {d.ledger.highest}, and nobody holds a commit any more"
        fail_job(d, reason, d.ledger.outage)
    else:
        become_running(d, chosen)
    return True


def _may_train_on(d: Draft) -> bool:
    """Whether all of the newest world is out of reach, so that it may make ticks that nobody here knows of (I16).

    A single member that is known to have left it, or to be dead, is proof that it stands still: unless its ticks need
    not all members (``--lease``).
    """
    stands_still = d.ledger.is_broken and d.policy.lease_s is None
    if stands_still or not (hosts := _out_of_reach(d)):
        return False
    _await_memory(d, None)
    d.reason = f"waits until the workers on {listed(hosts)}, out of reach, have given up"
    return True


def _out_of_reach(d: Draft) -> list[str]:
    """The hosts on which members of the newest world may live on, until the last of them has given up."""
    hosts = [host for host in d.hosts.values() if host.may_live_until > -inf]
    if not hosts or d.due(max(host.may_live_until for host in hosts)):
        return []
    return [host.name for host in hosts]


def _memory_is_given_up(d: Draft, slots: list[tuple[t.SlotId, t.CommitId]]) -> bool:
    """Whether enough workers have been READY for the regroup time-out, and still none is in any of these slots.

    An older commit is better than a longer wait, but a longer wait, for who boots there, is better than none at all.
    """
    if not isinstance(d.phase, Waiting):
        return False
    if d.phase.memory_since is None:
        _await_memory(d, d.now)
    if not d.due((_waiting(d).memory_since or d.now) + d.policy.regroup_timeout_s):
        return False
    seats = {seat for seat, _ in slots}
    boots = any(_may_be_ready(worker) and worker.id.seat in seats for worker in d.workers.values())
    lost = d.ledger.highest is not None and newest(staying(d)) == NOTHING
    return not (boots and lost) or d.due(_waiting(d).since + d.policy.elastic_timeout_s)


def _may_be_ready(worker: Worker) -> bool:
    """Whether it is on its way to its first READY, to leave then or to stay."""
    return not worker.joined and worker.ready is None and not worker.gone


def _window_is_over(d: Draft, stay: list[Worker], first: bool) -> bool:
    """Whether more workers are not worth waiting for (fewer than np are there)."""
    ready_at = sorted(worker.ready_at for worker in stay)
    if first:
        return d.due(ready_at[-1] + d.policy.join_window_s)
    if not d.booting:
        return True
    return d.due(ready_at[d.policy.min_np - 1] + d.policy.join_window_s)


def watch_window(d: Draft) -> None:
    """Once more, for those just started while a world waits for something else: the window's end is a deadline."""
    if isinstance(d.phase, Waiting):
        stay = staying(d)
        if d.policy.min_np <= len(stay) < d.policy.np:
            _window_is_over(d, stay, d.generation == 0)


def _let_leavers_go(d: Draft, stay: list[Worker]) -> None:
    """Too few stay for a world: leavers hold nothing back, except the newest commit."""
    if not d.leaving:
        return
    holder = postponed(d, stay)
    for worker in list(d.ready_workers()):
        if worker.leaving and worker is not holder:
            leave(d, worker)


def _plain_commands_are_done(d: Draft) -> bool:
    """Commands that do not use ``run``: all that were started have exited with 0, and no seat waits for its start."""
    if d.ledger.ever_ready or d.workers:
        return False
    finished = sum(slot.finished for slot in d.slots.values())
    seats = sum(host.slots for host in d.hosts.values() if not host.leaving and not host.rests(d.now))
    if not finished:
        return False
    if finished < d.policy.np and (finished < seats or finished < d.policy.min_np):
        return False
    become_over(d, True)
    return True


def _boots_fail(d: Draft) -> bool:
    """Before the first world: too few slots are left that have not failed again and again."""
    if not any(slot.failures >= d.policy.max_no_progress for slot in d.slots.values()):
        return False
    seats = [t.SlotId(host.name, index) for host in d.hosts.values() for index in range(host.slots)]
    slots = [d.slots[seat] for seat in seats if seat in d.slots]
    bad = [slot for slot in slots if slot.failures >= d.policy.max_no_progress]
    if not bad or len(seats) - len(bad) >= d.policy.min_np:
        return False
    reason = f"{len(bad)} slot(s) failed {d.policy.max_no_progress} times in a row before they were ready"
    fail_job(d, reason, d.ledger.outage)
    return True


# ---------------------------------------------------------------------------------------------------------- finishing


def become_finishing(d: Draft) -> None:
    """In: all members stand in the gate. Out: all have exited."""
    if isinstance(d.phase, Running) and d.phase.hold_since is not None:
        d.effects.append(t.Release(d.generation))
        d.note("release", cause="all members stand in the exit gate")
    d.effects.append(t.OpenGate(d.generation))
    d.become(Finishing(since=d.now))
    d.reason = "all members stand in the exit gate"


def finishing(d: Draft, phase: Finishing) -> None:
    failure = phase.failure or (d.broken[0] if d.broken else None)
    members = members_of(d)
    if not members:
        become_over(d, failure is None, failure.cause if failure else None)
        return
    if failure is not phase.failure:
        d.phase = replace(phase, failure=failure)
    d.reason = f"behind the exit gate: waits for the exit of {names(members)}"
