"""Measurement of the figures of a job. The core calls this module for each fact and when a new world forms.

A *lost commit* was sealed by all members of the ended world, as far as the driver received reports, but the next world
starts from an older commit. The *lost ticks* must be done again: they lie between the commit that the next world starts
from and the last tick that a survivor completed; if no member survives, that of any member. READY is exact, and so is
the control page that an agent reads after its worker has ended; of a lost host, only the last heartbeat is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from elasticstate.core import event_file, types as t
from elasticstate.core.commits import NOTHING, lost_in_an_unfinished_tick_s, lost_with_nothing_committed_s, newest
from elasticstate.core.figures import NAMES, Activity, JobFigures, Losses, Origin
from elasticstate.core.state import Draft, Forming, Membership, Over, Running, Together, Waiting, Worker
from elasticstate.core.worlds import survivors_of


def activity_of(d: Draft) -> Activity:
    """Return the present activity. It changes with events and at deadlines only."""
    match d.phase:
        case Waiting():
            return "boot" if _slots_counted_on(d) >= d.policy.fewest(d.generation) else "waiting_for_hosts"
        case Forming(at_tick=int(), clock=None):  # the members train up to this tick
            return "goodput" if d.ledger.ticking.standstill is None else "no_ticks"
        case Forming():
            return of_planned_end(d.phase)
        case Running(gate_since=None, first_tick=True):
            return "goodput" if d.ledger.ticking.standstill is None else "no_ticks"
        case Running(gate_since=None):
            trains = all(member.place == t.Place.TRAIN for member in d.members())
            return "no_ticks" if trains else "world_formation"
        case Together():
            return "no_ticks"
        case _:
            return "exit"


def of_planned_end(phase: Forming) -> Activity:
    """Return the activity between two worlds."""
    return "drain" if phase.drains else "regroup"


def _slots_counted_on(d: Draft) -> int:
    """Return the number of slots on hosts that may be used without a wait, and of workers on other hosts that stay."""
    found = [host for host in d.hosts.values() if host.cooldown_until <= d.now and host.agent != "stopping"]
    usable = {host.name: host.slots for host in found if host.slots > 0 and not (host.draining or host.loss)}
    others = (w for w in d.workers.values() if w.id.host not in usable and not (w.draining or w.gone))
    return sum(usable.values()) + sum(1 for _ in others)


_ORIGINS_KEPT = 64  # no worker or slot holds a commit of an older generation


def follow(d: Draft) -> None:
    """Enter the activity of the job after a step into its account of time."""
    d.update_ledger(account=d.ledger.account.switched(activity_of(d), d.now))


def member_left(d: Draft, ready: t.Ready) -> None:
    """Record that a member of the present generation is READY: it stopped training at the end of its last tick."""
    stopped_at, known, account = d.now - ready.paused_s, d.ledger.stopped_at, d.ledger.account
    standstill = d.ledger.ticking.standstill
    if standstill is not None and ready.ticks > standstill.ticks:
        account = account.with_completed_tick(d.now)
    account = account.with_commit_stall(ready.commit_s, d.now)
    if isinstance(d.phase, Forming) and d.phase.at_tick is not None:
        account = account.with_planned_end(of_planned_end(d.phase), ready.paused_s, d.now)
    elif ready.ticks:
        account = account.with_failure(d.now) if isinstance(d.phase, Running) else account
        account = account.with_last_tick(stopped_at)
    d.update_ledger(account=account)
    if known is None or stopped_at < known:
        d.update_ledger(stopped_at=stopped_at)


def commit_stalled(d: Draft, seconds: float) -> None:
    """Record the time that a member of the present generation has spent in commits."""
    if seconds > d.ledger.account.stalled_s:
        d.update_ledger(account=d.ledger.account.with_commit_stall(seconds, d.now))


def member_died(d: Draft, worker: Worker, seen: bool) -> None:
    """Record the end of a member of the present generation. ``seen``: its agent read its control page after the end."""
    ticks = max(worker.ticks, worker.ready.ticks if worker.ready is not None else 0, d.ledger.dead_ticks)
    d.update_ledger(dead_ticks=ticks, dead_unseen=d.ledger.dead_unseen or not seen)


def generation_failed(d: Draft) -> None:
    """Count an unplanned end of a generation, once, even if a new driver ends it again."""
    failures = d.ledger.failures + (d.ledger.failed != d.generation)
    d.update_ledger(account=d.ledger.account.with_failure(d.now), failures=failures, failed=d.generation)


def world_changes(d: Draft, chosen: Sequence[Worker], line: t.CommitId | None, from_copy: bool) -> None:
    """Count what the change to a world of ``chosen`` costs, except the time.

    ``line``: the commit that it starts from, if not from the newest of ``chosen``. ``from_copy``: it starts from a
    durable copy, if there is one. If the newest is not intact, more is lost than is counted here.
    """
    ledger = d.ledger
    best = newest(chosen) if line is None else line
    if from_copy:
        best = ledger.durable or NOTHING
    position, is_known = _position(d, best)
    if from_copy and d.generation > 0:
        position = position if is_known else _reached(d, chosen)[0]
        is_known = False
    if d.generation > 0:
        commits, all_commits = _lost_commits(d, best)
        ticks, all_ticks = _reached(d, chosen)
        bounds = {"commits_lost": all_commits, "ticks_lost": all_ticks and is_known}
        lower = frozenset(name for name, is_exact in bounds.items() if not is_exact)
        work = lost_with_nothing_committed_s(d), lost_in_an_unfinished_tick_s(d, ticks - _start(d))
        losses = Losses(0.0, commits, max(0, ticks - position), lower, *work)
        account = ledger.account.until(d.now).with_redone(losses.ticks, ticks - _start(d))
        down_since = ledger.down_since
        if down_since is None:
            down_since = d.now if ledger.stopped_at is None else ledger.stopped_at
        d.update_ledger(account=account, losses=ledger.losses + losses, down_since=down_since)
    next_generation(d)
    origin = Origin(d.generation + 1, users_commit(d, best), position)
    origins = (*ledger.origins, origin)[-_ORIGINS_KEPT:]
    d.update_ledger(origins=origins, stopped_at=None, dead_ticks=0, dead_unseen=False)


def all_lost(d: Draft) -> None:
    """Count the commits, and the ticks since the start, of a job that ends without any commit."""
    losses = Losses(0.0, max(1, _lost_commits(d, NOTHING)[0]), _reached(d, ())[0], frozenset(NAMES[1:]))
    d.update_ledger(losses=d.ledger.losses + losses)


def job_failed(d: Draft) -> None:
    """Count the work since the last tick of a job that fails."""
    unfinished_s = lost_in_an_unfinished_tick_s(d, _reached(d, ())[0] - _start(d))
    d.update_ledger(losses=d.ledger.losses + Losses(unfinished_s=unfinished_s))


def next_generation(d: Draft) -> None:
    """End the account of the present generation. Call it before the next world is entered."""
    account = d.ledger.account.until(d.now)
    d.note(event_file.GenerationFinished, **account.fields())
    d.update_ledger(account=account.with_next_generation(d.now))


def training_resumed(d: Draft, at: float) -> None:
    """Record that the new world has completed its first tick, or has nothing more to do."""
    down_since = d.ledger.down_since
    if down_since is not None:
        losses = dataclasses.replace(d.ledger.losses, downtime_s=at - down_since)
        d.note(event_file.TrainingResumed, **losses.fields())
        d.update_ledger(total=d.ledger.total + losses, losses=Losses(), down_since=None)


def figures_of(m: Membership, now: float) -> JobFigures:
    """Return the figures of the job."""
    ledger = m.ledger
    return JobFigures(m.generation, ledger.failures, _losses(m, now), ledger.account.job(now), ledger.has_ticked)


def ticks_of(m: Membership) -> int:
    """Return the number of completed ticks, those that were done again included. It never falls."""
    start = next((origin.position for origin in reversed(m.ledger.origins) if origin.generation == m.generation), 0)
    members = [worker for worker in m.workers.values() if 0 < worker.joined == m.generation]
    ready = [worker.ready.ticks for worker in members if worker.ready is not None]
    present = max([m.ledger.dead_ticks, *ready, *(worker.ticks for worker in members)])
    return start + present + m.ledger.total.ticks + m.ledger.losses.ticks


def _losses(m: Membership, now: float) -> Losses:
    """Return the losses of the whole job, including a downtime that has not ended yet."""
    ledger = m.ledger
    now = m.phase.ended_at if isinstance(m.phase, Over) else now
    since = ledger.stopped_at if ledger.down_since is None else ledger.down_since
    if not ledger.has_ticked and (since is not None or m.generation > 1):
        unknown = {"ticks_lost"} if ledger.losses.uncommitted_s else set()
        bounds = ledger.losses.lower_bounds | unknown
        return ledger.total + dataclasses.replace(ledger.losses, downtime_s=None, lower_bounds=bounds)
    return ledger.total + dataclasses.replace(ledger.losses, downtime_s=0.0 if since is None else now - since)


def _origin(d: Draft, generation: int) -> Origin | None:
    return next((origin for origin in reversed(d.ledger.origins) if origin.generation == generation), None)


def users_commit(d: Draft, commit: t.CommitId) -> t.CommitId:
    """Return the user's commit that ``(g, 0)``, sealed by sync, copies; any other commit is returned as it is."""
    origin = _origin(d, commit.generation) if commit.tick == 0 else None
    return commit if origin is None else origin.commit


def _position(d: Draft, commit: t.CommitId) -> tuple[int, bool]:
    """Return the number of ticks from the start of the job to a commit, and True if this number is known."""
    if commit == NOTHING:
        return 0, not d.ledger.origins or d.ledger.origins[0].generation == 1
    origin = _origin(d, commit.generation)
    return (0, False) if origin is None else (origin.position + commit.tick, True)


def _reached(d: Draft, chosen: Sequence[Worker]) -> tuple[int, bool]:
    """Return the position of the last completed tick of the ended world, and True if this position is exact."""
    start = _start(d)
    survivors = survivors_of(d, chosen)
    if survivors:
        return start + max(ready.ticks for ready in survivors), True
    sealed = [commit.tick for _, commit in _sealed(d) if commit.generation == d.generation]
    is_exact = not d.ledger.dead_unseen and not any(d.breaks(worker) for worker in d.workers.values())
    return start + max([d.ledger.dead_ticks, *sealed]), is_exact


def _start(d: Draft) -> int:
    """Return the position of the commit that the present generation started from."""
    origin = _origin(d, d.generation)
    return 0 if origin is None else origin.position


def _sealed(d: Draft) -> Iterator[tuple[t.SlotId, t.CommitId]]:
    """Yield, for each keeper in the ended world, the newest commit that is known to be sealed in its slot."""
    world = d.world
    for placement in world.members if world is not None else ():
        if world is not None and not world.keeps(placement.rank):
            continue
        slot_id = placement.worker.slot_id
        slot = d.slots.get(slot_id)
        yield slot_id, NOTHING if slot is None else slot.sealed


def _made(d: Draft, start: t.CommitId) -> Iterator[tuple[t.SlotId, t.CommitId]]:
    """Yield, for each keeper in the ended world, the newest commit that it made there; ``start`` if none."""
    for slot_id, commit in _sealed(d):
        yield slot_id, commit if commit.generation == d.generation and commit.tick else start


def _lost_commits(d: Draft, best: t.CommitId) -> tuple[int, bool]:
    """Return the number of lost commits that were reported to the driver, and True if there can be no others."""
    origin = _origin(d, d.generation)
    start = NOTHING if origin is None else origin.commit
    best = users_commit(d, best)
    if any(commit <= best and _is_seen(d, slot_id) for slot_id, commit in _made(d, start)):
        return 0, True
    sealed = dict(_made(d, start))
    seen = [slot_id for slot_id in sealed if _is_seen(d, slot_id)]
    made = min(sealed.values(), default=NOTHING)
    readies = [(worker.id.slot_id, worker.ready) for worker in d.workers.values() if worker.ready is not None]
    reported = {commit for _, ready in readies for commit in (ready.commit, ready.previous) if commit is not None}
    lost = {commit for commit in reported.union(sealed.values(), [start]) if commit.tick and best < commit <= made}
    # A slot has two buffers: if the newer buffer was damaged, the older buffer holds the commit directly before.
    own = dict(_sealed(d))
    next_ones = (slot_id for slot_id, ready in readies if ready.commit == best)
    is_next = any(slot_id in own and users_commit(d, own[slot_id]) == made for slot_id in next_ones)
    return len(lost), len(seen) == len(sealed) and is_next


def _is_seen(d: Draft, slot_id: t.SlotId) -> bool:
    """Return True if the agent read the control page, or the worker was READY, after the slot's last commit in the
    ended world."""
    slot = d.slots.get(slot_id)
    worker = d.workers.get(slot.worker) if slot is not None and slot.worker is not None else None
    still_in_it = worker is not None and d.breaks(worker) and worker.ready is None
    return d.hosts[slot_id.host].agent == "joined" and not still_in_it
