"""Hosts and slots: which slots drain, and which agents and workers the core starts and stops."""

from __future__ import annotations

from collections.abc import Iterator, Set
from math import inf

from elasticstate.core import types as t
from elasticstate.core.cooldown import FAILURES_IN_A_ROW
from elasticstate.core.line import awaited_copies, hosts_of, needed_hosts
from elasticstate.core.partition import may_train_on
from elasticstate.core.records import (
    NEW_SLOT,
    Draft,
    Finishing,
    Forming,
    Host,
    Membership,
    Over,
    Running,
    Slot,
    Waiting,
    Worker,
)
from elasticstate.core.retained import awaited
from elasticstate.core.together import begin_round, chosen, may_start, places, window_end
from elasticstate.core.worlds import may_hold_more


def mark_draining(d: Draft) -> None:
    """Start the drain of workers whose slot discovery has removed, or whose host has a preemption notice."""
    if isinstance(d.phase, Finishing):
        return  # behind the gate each worker exits in its own time
    for host in d.hosts.values():
        if not (host.draining or host.slots < host.slots_ever) or not d.living.get(host.name):
            continue
        gone = "discovery removed its slot" if host.slots else f"discovery removed host {host.name}"
        for worker in [d.workers[worker] for worker in _living_workers(d, host)]:
            if (host.draining or worker.id.slot >= host.slots) and not (worker.draining or worker.gone):
                d.put(worker, draining=host.draining or gone, draining_since=d.now)


def stop(d: Draft, worker: Worker, reason: str, *, kill: bool = False, overdue: bool = False) -> None:
    """Stop a worker. It does not count any more, and its exit is no failure.

    ``overdue``: the worker should have ended by itself, so people are shown its exit as unexpected.
    """
    d.effects.append(t.StopWorker(worker.id, reason, kill))
    d.put(worker, gone="stopped", ready=None, overdue=overdue)


def leave(d: Draft, worker: Worker) -> None:
    d.effects.append(t.Leave(worker.id))
    d.put(worker, gone="stopped", ready=None)


def start_and_stop(d: Draft) -> None:
    """Start workers in free slots that the job needs, and stop the others. Called after the decision on the world."""
    if isinstance(d.phase, Over):
        return
    stop_overdue_boots(d)  # counts from the first world on, which this step may have made
    is_sought = not isinstance(d.phase, (Running, Finishing))
    holders = awaited(d) if is_sought else []
    may_hold = may_hold_more(d, d.ready_workers()) if is_sought and d.draining else []
    _stop_unneeded(d, {slot_id for slot_id, _ in holders}.union(worker.id.slot_id for worker in may_hold))
    if isinstance(d.phase, Finishing):
        return
    hosts = d.by_discovery()
    plan = _Plan(d, holders, hosts)
    for host in hosts:
        if host.name in plan.usable:
            if host.agent == "none":
                d.put_host(host, agent="asked", report="agent started", reported_at=d.now)
                d.effects.append(t.StartAgent(host.name))
        elif host.agent in ("asked", "joined") and not _wanted(host) and not d.living.get(host.name):
            if host.name in plan.holding_hosts or host.name in needed_hosts(d):
                continue  # the host's agent keeps the newest commit: discovery may name the host again
            d.put_host(host, agent="stopping")
            d.effects.append(t.StopAgent(host.name, host.draining or f"discovery removed host {host.name}"))
    _start_workers(d, plan)


def slot_deadlines(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the times, by name, at which agents and workers may be started or stopped; some may have passed."""
    if isinstance(d.phase, (Finishing, Over)):
        return
    if d.generation and d.booting:
        booting_since = min(worker.started_at for worker in d.workers.values() if worker.booting)
        yield "boot", booting_since + d.policy.start_timeout_s
    if _is_quiet(d):
        yield "quiet time", d.ledger.quiet_until
    if may_start(d):
        yield "start of a round", window_end(d)
    is_sought = not isinstance(d.phase, Running)
    plan = _Plan(d, awaited(d) if is_sought else [], d.by_discovery())
    yield from plan.deadlines()


class _Plan:
    """Plan for starts: the hosts that may be used now, and their free slots."""

    def __init__(self, d: Draft, holders: list[tuple[t.SlotId, t.CommitId]], hosts: list[Host]) -> None:
        """``holders``: slots whose retained commits are awaited, the newest first. ``hosts``: in discovery's order."""
        self._d = d
        self.holders = holders
        self.hosts = hosts
        self.holding_hosts = {slot_id.host for slot_id, _ in holders}
        if isinstance(d.phase, Waiting):
            self.holding_hosts.update(hosts_of(awaited_copies(d)))
        self.awaits_retained = isinstance(d.phase, Waiting) and d.phase.retained_since is not None
        candidates = [host for host in hosts if _wanted(host) or (host.slots and host.name in self.holding_hosts)]
        self._cooling = [host for host in candidates if host.cooldown_until > d.now]
        self._warm = [host for host in candidates if host.cooldown_until <= d.now]
        self._giving_way = self._find_giving_way() if self._cooling else []
        used_now = (*self._warm, *(host for host in self._giving_way if d.now >= host.gives_way_at))
        self.usable = {host.name for host in used_now}

    def _find_giving_way(self) -> list[Host]:
        """Return hosts in cooldown that are used in spite of it, each from its ``gives_way_at`` on: when the job would
        be below min_np without them (I5), or a retained commit there is awaited."""
        d = self._d
        warm = [host for host in self._warm if not host.draining]
        is_short = _slots_counted_on(d) + sum(_good_slots(d, host) for host in warm) < d.policy.fewest(d.generation)
        return [h for h in self._cooling if is_short or (self.awaits_retained and h.name in self.holding_hosts)]

    def free_slots(self) -> list[tuple[t.SlotId, Slot]]:
        """Return the slots in which a worker may be started, when their backoff is over.

        Of draining hosts, and of barred slots, only those with an awaited retained commit.
        """
        d, held = self._d, {slot_id for slot_id, _ in self.holders}
        hosts = [d.hosts[host.name] for host in self.hosts if host.name in self.usable]
        found_in = [h for h in hosts if h.agent == "joined" and d.living.get(h.name) != h.slots_ever]
        free = [found for host in found_in for found in _free_slots(d, host)]
        return [
            (slot_id, slot)
            for slot_id, slot in free
            if slot_id in held or not (d.hosts[slot_id.host].draining or slot.barred)
        ]

    def start_at(self, slot_id: t.SlotId, slot: Slot, is_short: bool) -> float:
        """Return the time from which a worker may be started in a free slot."""
        gives_way = is_short or (self.awaits_retained and slot_id in self.newest_holders)
        return slot.gives_way_at if gives_way else slot.not_before

    def startable(self) -> list[t.SlotId]:
        """Return the free slots in which a worker may be started now, in discovery's order."""
        d, free = self._d, self.free_slots()
        is_short = self.is_short(free)
        found = ((slot_id, self.start_at(slot_id, slot, is_short)) for slot_id, slot in free)
        return [slot_id for slot_id, at in found if d.now >= at and not d.hosts[slot_id.host].draining]

    def expects_more(self, startable: list[t.SlotId]) -> bool:
        """Return True if more slots than these may soon be free: agents are being started, backoffs are not over, or
        more hosts may dial in."""
        asked = any(self._d.hosts[name].agent in ("none", "asked") for name in self.usable)
        return asked or self._d.policy.listen is not None or len(startable) < len(self.free_slots())

    @property
    def newest_holders(self) -> set[t.SlotId]:
        """The slots that retain the newest commit."""
        return {slot_id for slot_id, commit in self.holders if commit == self.holders[0][1]}

    def is_short(self, free: list[tuple[t.SlotId, Slot]]) -> bool:
        """Return True if the job would be below min_np without the slots whose backoff is not over."""
        d = self._d
        ready = [(slot_id, slot) for slot_id, slot in free if slot.not_before <= d.now]
        if len(ready) == len(free):
            return False
        in_time = (slot_id for slot_id, slot in ready if slot.failures < FAILURES_IN_A_ROW) if _is_in_time(d) else ()
        good = sum(not d.hosts[slot_id.host].draining for slot_id in in_time)
        return _slots_counted_on(d) + good < d.policy.fewest(d.generation)

    def deadlines(self) -> Iterator[tuple[str, float]]:
        """Yield the ends of cooldowns and backoffs, and the times from which they give way."""
        d = self._d
        for host in self._cooling:
            yield f"cooldown of host {host.name}", host.cooldown_until
        for host in self._giving_way:
            yield f"host {host.name} gives way", host.gives_way_at
        free = self.free_slots() if _may_start_workers(d) and self._has_vacancies() else []
        backing_off = [(slot_id, slot) for slot_id, slot in free if slot.not_before > d.now]
        is_short = self.is_short(free)
        for slot_id, slot in backing_off:
            yield f"backoff of slot {slot_id}", self.start_at(slot_id, slot, is_short)
        if self._cooling or backing_off:
            yield from _late_start_deadlines(d, self.hosts)

    def _has_vacancies(self) -> bool:
        return self.awaits_retained or _vacancies(self._d) > 0


def _stop_unneeded(d: Draft, held: Set[t.SlotId]) -> None:
    """Stop workers outside the present world that the job does not need: draining workers, and behind the gate all. A
    draining worker stays if its slot is in ``held``: it holds, or may hold, the newest commit."""
    finishing = isinstance(d.phase, Finishing)
    if not (finishing or d.draining):
        return
    for worker in list(d.workers.values()):
        if worker.gone or not (worker.draining or finishing) or d.breaks(worker) or worker.id.slot_id in held:
            continue
        if d.in_round(worker):
            continue  # the round ends for all its workers together
        reason = worker.draining or "the job is over"
        if worker.ready is None:
            stop(d, worker, reason)
        elif isinstance(d.phase, (Running, Finishing)):
            leave(d, worker)  # in Waiting and Forming the worker stays: it may hold the newest commit


def stop_overdue_boots(d: Draft) -> None:
    """Kill workers that have booted for --start-timeout: their slots have failed. (Before the first world, this
    time-out ends the job.)"""
    limit_s = d.policy.start_timeout_s
    if not d.generation or isinstance(d.phase, Finishing) or not d.booting:
        return
    for worker in list(d.workers.values()):
        if worker.booting and d.now >= worker.started_at + limit_s:
            d.warn(f"{worker.id} is killed: not ready within --start-timeout of {limit_s:g} s")
            d.effects.append(t.StopWorker(worker.id, f"not ready within --start-timeout of {limit_s:g} s", kill=True))
            d.put(worker, gone="failed")


def _wanted(host: Host) -> bool:
    return host.slots > 0 and not host.draining


def _living_workers(d: Draft, host: Host) -> Iterator[t.WorkerId]:
    for index in range(host.slots_ever):
        slot = d.slots.get(t.SlotId(host.name, index))
        if slot is not None and slot.worker is not None:
            yield slot.worker


def _free_slots(d: Draft, host: Host) -> Iterator[tuple[t.SlotId, Slot]]:
    """Yield the free slots of a host. A worker may be started there when the backoff is over."""
    for index in range(host.slots):
        slot_id = t.SlotId(host.name, index)
        slot = d.slots.get(slot_id, NEW_SLOT)
        if slot.worker is None and not slot.finished:
            yield slot_id, slot


def _finished_slots(d: Draft) -> int:
    return 0 if d.ledger.ever_ready else sum(slot.finished for slot in d.slots.values())


def _taken_slots(d: Draft) -> int:
    return _finished_slots(d) + sum(not (worker.draining or worker.gone) for worker in d.workers.values())


def _vacancies(d: Draft) -> float:
    """Return how many workers may still be started: up to max_np, and the spares beside a world that trains."""
    if d.policy.max_np is None:
        return inf
    spares = d.policy.spares if isinstance(d.phase, Running) and d.phase.first_tick else 0
    return d.policy.max_np + spares - _taken_slots(d)


def _hosts_of_world(d: Draft) -> set[str]:
    """Return the hosts of the world's members if the next worker is a spare: it had better be on another host."""
    is_whole = d.policy.spares and d.policy.max_np is not None and len(d.members()) >= d.policy.max_np
    return {member.id.host for member in d.members()} if is_whole else set()


def _slots_counted_on(d: Draft) -> int:
    """Return the number of slots with a worker that is READY, in a world, or booting with a chance of success."""
    return _finished_slots(d) + sum(_is_counted_on(d, worker) for worker in d.workers.values())


def _is_counted_on(d: Draft, worker: Worker) -> bool:
    if worker.booting:
        return d.slots[worker.id.slot_id].failures < FAILURES_IN_A_ROW and _is_in_time(d, worker.started_at)
    return not (worker.draining or worker.gone) or is_restarting(d, worker)


def is_restarting(d: Draft | Membership, worker: Worker) -> bool:
    """Return True if the worker is stopped only because others of its round have ended: its slot is as good as free."""
    is_in_use = worker.id.slot < d.hosts[worker.id.host].slots
    return worker.in_round and worker.gone == "stopped" and not worker.draining and is_in_use


def _is_in_time(d: Draft, asked_at: float = inf) -> bool:
    """Return True if a start that was requested at ``asked_at``, or would be now, is worth waiting for. It is for half
    of the time after which the job is given up. The other half is for all other starts."""
    return d.now < _late_from(d, asked_at)


def _late_from(d: Draft, asked_at: float = inf) -> float:
    waits_since = d.phase.since if isinstance(d.phase, Waiting) else inf
    return min(asked_at, waits_since) + d.time_to_give_up_s() / 2


def _late_start_deadlines(d: Draft, hosts: list[Host]) -> Iterator[tuple[str, float]]:
    """Yield the times at which booting workers and requested agents are not counted on any more."""
    yield "starts are late", _late_from(d)
    for worker in d.workers.values():
        if worker.booting:
            yield f"boot of {worker.id} is late", _late_from(d, worker.started_at)
    for host in hosts:
        if host.agent == "asked":
            yield f"agent of host {host.name} is late", _late_from(d, host.reported_at)


def _good_slots(d: Draft, host: Host) -> int:
    """Return the number of free slots of a host that may be counted on."""
    if not _is_in_time(d, host.reported_at if host.agent == "asked" else inf):
        return 0
    return sum(slot.failures < FAILURES_IN_A_ROW and not slot.barred for _, slot in _free_slots(d, host))


def _is_recovering(d: Draft) -> bool:
    return isinstance(d.phase, Forming) or (isinstance(d.phase, Running) and not d.phase.first_tick)


def _is_quiet(d: Draft) -> bool:
    """Return True if no worker may start: a boot would compete with the recovery, or, before any worker was READY, the
    first failure is so recent that all other workers may fail in the same way."""
    return d.now < d.ledger.quiet_until and (_is_recovering(d) or not d.ledger.ever_ready)


def _may_start_workers(d: Draft) -> bool:
    """Return False in a quiet time, or while members with a confirmed own error have not exited: all members may end by
    their own errors."""
    if _is_quiet(d):
        return False
    if not _is_recovering(d):
        return True
    return not any(worker.confirmed_at is not None and not worker.gone for worker in d.workers.values())


def _start_workers(d: Draft, plan: _Plan) -> None:
    """Start workers in free slots, first in slots that retain a commit newer than any READY worker's. If such a commit
    is awaited, one worker may be started beyond max_np."""
    if not _may_start_workers(d):
        return
    if d.ledger.kind != "elastic":
        _start_round(d, plan)
        return
    vacancies = _vacancies(d)
    order = {slot_id: position for position, (slot_id, _) in enumerate(plan.holders)}
    newest = plan.newest_holders
    beyond = plan.awaits_retained and all(d.slots[slot_id].worker is None for slot_id in newest)
    free = plan.free_slots()
    used = _hosts_of_world(d)
    free.sort(key=lambda found: (order.get(found[0], len(order)), found[0].host in used))
    is_short = plan.is_short(free)
    for slot_id, slot in free:
        if vacancies <= 0 and not (beyond and slot_id in newest):
            return
        if d.now >= plan.start_at(slot_id, slot, is_short):
            _start_worker(d, slot_id)
            beyond = beyond and slot_id not in newest
            vacancies -= not d.hosts[slot_id.host].draining  # a draining host's worker only provides its commit


def _start_round(d: Draft, plan: _Plan) -> None:
    """Start workers together, each with its place in a world, if the command may be plain."""
    if not may_start(d):
        return
    free = plan.startable()
    enough = len(free) >= d.policy.fewest(d.generation) and not may_train_on(d)
    if enough != (d.ledger.enough_since < inf):
        d.update_ledger(enough_since=d.now if enough else inf)
    slot_ids = chosen(d, free, plan.expects_more(free)) if enough else []
    if not slot_ids:
        return
    members = places(d, [_next_worker(d, slot_id) for slot_id in slot_ids])
    for placement, place in members:
        _start_worker(d, placement.worker.slot_id, place)
    begin_round(d, [placement for placement, _ in members])


def newcomers(d: Draft) -> list[t.SlotId]:
    """Return the free slots that fit into the next world of plain workers. Slots that failed repeatedly do not count:
    each start there may end the whole world."""
    plan = _Plan(d, [], d.by_discovery())
    free = [slot_id for slot_id in plan.startable() if d.slots.get(slot_id, NEW_SLOT).failures < FAILURES_IN_A_ROW]
    vacancies = _vacancies(d)
    return free if vacancies == inf else free[: max(0, int(vacancies))]


def _next_worker(d: Draft, slot_id: t.SlotId) -> t.WorkerId:
    return t.WorkerId(*slot_id, d.slots[slot_id].incarnation + 1 if slot_id in d.slots else 1)


def _start_worker(d: Draft, slot_id: t.SlotId, place: t.PlainPlace | None = None) -> None:
    draining = d.hosts[slot_id.host].draining
    draining_since = d.now if draining else inf
    worker = Worker(
        _next_worker(d, slot_id),
        started_at=d.now,
        draining=draining,
        draining_since=draining_since,
        in_round=place is not None,
    )
    d.add(worker)
    d.put_slot(slot_id, incarnation=worker.id.incarnation, worker=worker.id)
    d.effects.append(t.StartWorker(worker.id, place=place))
    d.note("worker_started", worker=str(worker.id), host=slot_id.host, slot=slot_id.slot)
