"""Hosts and slots: whose seat is wanted no more, which agents and workers are started and stopped."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from math import inf

from elasticstate.core import types as t
from elasticstate.core.cooldown import FAILURES_IN_A_ROW
from elasticstate.core.forming import may_hold_more
from elasticstate.core.memory import awaited
from elasticstate.core.records import (
    NEW_SLOT,
    Draft,
    Finishing,
    Forming,
    Host,
    Over,
    Running,
    Slot,
    Waiting,
    Worker,
    by_discovery,
)


def mark_leavers(d: Draft) -> None:
    """A worker whose seat discovery takes back, or whose host has had notice, drains from now on."""
    if isinstance(d.phase, Finishing):
        return  # behind the gate it ends in its own time
    for host in d.hosts.values():
        if not (host.leaving or host.slots < host.seats) or not d.living.get(host.name):
            continue
        gone = "its slot was taken away" if host.slots else f"host {host.name} is gone from discovery"
        for worker in [d.workers[worker] for worker in _living(d, host)]:
            if (host.leaving or worker.id.slot >= host.slots) and not (worker.leaving or worker.gone):
                d.put(worker, leaving=host.leaving or gone, leaving_at=d.now)


def stop(d: Draft, worker: Worker, reason: str, *, kill: bool = False) -> None:
    """It counts no more; its exit is no failure."""
    d.effects.append(t.StopWorker(worker.id, reason, kill))
    d.put(worker, gone="stopped", ready=None)


def leave(d: Draft, worker: Worker) -> None:
    d.effects.append(t.Leave(worker.id))
    d.put(worker, gone="stopped", ready=None)


def start_and_stop(d: Draft) -> None:
    """After the decision on the world: fill the free seats that are wanted, and clear those that are not."""
    if isinstance(d.phase, Over):
        return
    bound_boots(d)  # from the first world on, which may be of this step
    is_sought = not isinstance(d.phase, (Running, Finishing))
    holders = awaited(d) if is_sought else []
    may_hold = may_hold_more(d, d.ready_workers()) if is_sought and d.leaving else []
    _stop_strangers(d, {seat for seat, _ in holders}.union(worker.id.seat for worker in may_hold))
    if isinstance(d.phase, Finishing):
        return
    hosts = by_discovery(d)
    waits = isinstance(d.phase, Waiting) and d.phase.memory_since is not None
    holding = {seat.host for seat, _ in holders}
    usable = _usable_hosts(d, hosts, holding, waits)
    said = len(d.effects)
    for host in hosts:
        if host.name in usable:
            if host.agent == "none":
                d.put_host(host, agent="asked", heard="its agent was started", heard_at=d.now)
                d.effects.append(t.StartAgent(host.name))
        elif host.agent in ("asked", "joined") and not _wanted(host) and not d.living.get(host.name):
            if any(seat.host == host.name for seat, _ in holders):
                continue  # its agent keeps the newest commit: discovery may name the host again
            d.put_host(host, agent="stopping")
            d.effects.append(t.StopAgent(host.name, host.leaving or f"host {host.name} is gone from discovery"))
    hosts = [d.hosts[host.name] for host in hosts]
    usable_now = [host for host in hosts if host.name in usable]
    _start_workers(d, usable_now, holders, waits)
    bound_boots(d)  # once more: the deadlines of those just started
    if len(d.effects) > said:
        _usable_hosts(d, hosts, holding, waits)
        _is_short(d, _free(d, usable_now, {seat for seat, _ in holders}))


def _stop_strangers(d: Draft, held: Set[t.SlotId]) -> None:
    """Workers outside the present world that nobody wants: leavers, and behind the gate all. Not a leaver where the
    newest commit is, or may be, ``held``."""
    finishing = isinstance(d.phase, Finishing)
    if not (finishing or d.leaving):
        return
    for worker in list(d.workers.values()):
        if worker.gone or not (worker.leaving or finishing) or d.breaks(worker) or worker.id.seat in held:
            continue
        reason = worker.leaving or "the job finishes"
        if worker.ready is None:
            stop(d, worker, reason)
        elif isinstance(d.phase, (Running, Finishing)):
            leave(d, worker)  # while a world is sought it stays: it may hold the newest commit


def bound_boots(d: Draft) -> None:
    """Whoever has been booting for the start time-out is killed, and its slot has failed. (Before the first world the
    job ends by that time-out.)"""
    limit_s = d.policy.start_timeout_s
    if not d.generation or isinstance(d.phase, Finishing) or not d.booting:
        return
    for worker in list(d.workers.values()):
        if worker.booting and d.due(worker.started_at + limit_s):
            d.effects.append(t.StopWorker(worker.id, f"not ready within --start-timeout of {limit_s:g} s", kill=True))
            d.put(worker, gone="failed")


def _wanted(host: Host) -> bool:
    return host.slots > 0 and not host.leaving


def _living(d: Draft, host: Host) -> Iterator[t.WorkerId]:
    for index in range(host.seats):
        slot = d.slots.get(t.SlotId(host.name, index))
        if slot is not None and slot.worker is not None:
            yield slot.worker


def _free_slots(d: Draft, host: Host) -> Iterator[tuple[t.SlotId, Slot]]:
    """The seats of a host in which a worker may be started, when it is time."""
    if d.living.get(host.name) == host.seats:
        return
    for index in range(host.slots):
        seat = t.SlotId(host.name, index)
        slot = d.slots.get(seat, NEW_SLOT)
        if slot.worker is None and not slot.finished:
            yield seat, slot


def _finished_seats(d: Draft) -> int:
    return 0 if d.ledger.ever_ready else sum(slot.finished for slot in d.slots.values())


def _taken_seats(d: Draft) -> int:
    return _finished_seats(d) + sum(not (worker.leaving or worker.gone) for worker in d.workers.values())


def _seats_counted_on(d: Draft) -> int:
    """Taken, by workers that are READY, in a world, or on the way there with some hope."""
    return _finished_seats(d) + sum(_is_counted_on(d, worker) for worker in d.workers.values())


def _is_counted_on(d: Draft, worker: Worker) -> bool:
    if worker.booting:
        return d.slots[worker.id.seat].failures < FAILURES_IN_A_ROW and _is_in_time(d, worker.started_at)
    return not (worker.leaving or worker.gone)


def _is_in_time(d: Draft, asked_at: float = inf) -> bool:
    """Whether what was asked for, or would be now, is worth waiting for: not after half of the time after which the job
    is given up. The other half is for all others."""
    waits_since = d.phase.since if isinstance(d.phase, Waiting) else inf
    return not d.due(min(asked_at, waits_since) + d.time_to_give_up_s() / 2)


def _good_slots(d: Draft, host: Host) -> int:
    """Free seats of a host that may be counted on."""
    if not _is_in_time(d, host.heard_at if host.agent == "asked" else inf):
        return 0
    return sum(slot.failures < FAILURES_IN_A_ROW for _, slot in _free_slots(d, host))


def _usable_hosts(d: Draft, hosts: list[Host], holders: set[str], waits: bool) -> set[str]:
    """Hosts on which something may be started: cooldown refuses, unless the job would be below min_np (I5), or
    ``waits`` for what is in the memory of these ``holders``. One of those that had notice is used once more."""
    usable = {host.name for host in hosts if _wanted(host) or (host.slots and host.name in holders)}
    cooling = [host for host in hosts if host.name in usable and host.cooldown_until > d.now]
    if not cooling:
        return usable
    usable.difference_update(host.name for host in cooling)
    warm = [host for host in hosts if host.name in usable and not host.leaving]
    enough = _seats_counted_on(d) + sum(_good_slots(d, host) for host in warm)
    for host in cooling:
        if (enough < d.policy.min_np or (waits and host.name in holders)) and d.due(host.gives_way_at):
            usable.add(host.name)
        d.due(host.cooldown_until)
    return usable


def _start_workers(d: Draft, hosts: list[Host], holders: list[tuple[t.SlotId, t.CommitId]], waits: bool) -> None:
    """Slots whose memory holds what nobody has come first; if that is waited for, one with the newest commit may be
    started beyond max_np."""
    recovering = isinstance(d.phase, Forming) or (isinstance(d.phase, Running) and not d.phase.first_tick)
    if recovering and not d.due(d.ledger.quiet_until):
        return  # a boot would compete with the recovery
    if recovering and any(worker.confirmed_at is not None and not worker.gone for worker in d.workers.values()):
        return  # whether all members end by their own errors is not known yet
    room = inf if d.policy.max_np is None else d.policy.max_np - _taken_seats(d)
    order = {seat: position for position, (seat, _) in enumerate(holders)}
    newest = {seat for seat, commit in holders if commit == holders[0][1]}
    beyond = waits and all(d.slots[seat].worker is None for seat in newest)
    free = _free(d, hosts, order)
    free.sort(key=lambda found: order.get(found[0], len(order)))
    short = _is_short(d, free)
    for seat, slot in free:
        if room <= 0 and not (beyond and seat in newest):
            return
        if d.due(slot.gives_way_at if short or (waits and seat in newest) else slot.not_before):
            _start_worker(d, seat)
            beyond = beyond and seat not in newest
            room -= not d.hosts[seat.host].leaving  # a leaver comes for its memory only: it takes nobody's place


def _free(d: Draft, hosts: list[Host], held: Collection[t.SlotId]) -> list[tuple[t.SlotId, Slot]]:
    """Of hosts that leave only those where the newest commit is ``held``."""
    joined = [host for host in hosts if host.agent == "joined"]
    return [found for host in joined for found in _free_slots(d, host) if not host.leaving or found[0] in held]


def _is_short(d: Draft, free: list[tuple[t.SlotId, Slot]]) -> bool:
    """Whether the job would be below min_np without the slots that are left alone after a failure."""
    ready = [(seat, slot) for seat, slot in free if slot.not_before <= d.now]
    if len(ready) == len(free):
        return False
    hopeful = (seat for seat, slot in ready if slot.failures < FAILURES_IN_A_ROW) if _is_in_time(d) else ()
    good = sum(not d.hosts[seat.host].leaving for seat in hopeful)
    return _seats_counted_on(d) + good < d.policy.min_np


def _start_worker(d: Draft, seat: t.SlotId) -> None:
    incarnation = d.slots[seat].incarnation + 1 if seat in d.slots else 1
    leaving = d.hosts[seat.host].leaving
    leaving_at = d.now if leaving else inf
    worker = Worker(t.WorkerId(*seat, incarnation), started_at=d.now, leaving=leaving, leaving_at=leaving_at)
    d.add(worker)
    d.put_slot(seat, incarnation=incarnation, worker=worker.id)
    d.effects.append(t.StartWorker(worker.id))
    d.note("worker_started", worker=str(worker.id), host=seat.host, slot=seat.slot)
