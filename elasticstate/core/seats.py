"""Hosts and slots: whose seat is wanted no more, which agents and workers are started and stopped."""

from __future__ import annotations

from collections.abc import Iterator, Set
from math import inf

from elasticstate.core import types as t
from elasticstate.core.memory import awaited
from elasticstate.core.records import Draft, Finishing, Forming, Host, Over, Running, Waiting, Worker, by_discovery


def mark_leavers(d: Draft) -> None:
    """A worker whose seat discovery takes back, or whose host has had notice, drains from now on."""
    if isinstance(d.phase, Finishing):
        return  # behind the gate it ends in its own time
    for worker in list(d.workers.values()):
        if worker.leaving or worker.gone:
            continue
        host = d.hosts[worker.id.host]
        if host.leaving:
            reason = host.leaving
        elif worker.id.slot >= host.slots:
            reason = "its slot was taken away" if host.slots else f"host {host.name} is gone from discovery"
        else:
            continue
        d.put(worker, leaving=reason, leaving_at=d.now)


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
    holders = [] if isinstance(d.phase, (Running, Finishing)) else awaited(d)
    _stop_strangers(d, {seat for seat, _ in holders})
    if isinstance(d.phase, Finishing):
        return
    hosts = by_discovery(d)
    waits = isinstance(d.phase, Waiting) and d.phase.memory_since is not None
    usable = _usable_hosts(d, hosts, {seat.host for seat, _ in holders}, waits)
    for host in hosts:
        if host.name in usable:
            if host.agent == "none":
                d.put_host(host, agent="asked", heard="its agent was asked for")
                d.effects.append(t.StartAgent(host.name))
        elif host.agent in ("asked", "joined") and not _wanted(host) and not any(_living(d, host)):
            if any(seat.host == host.name for seat, _ in holders):
                continue  # its agent keeps the newest commit: discovery may name the host again
            d.put_host(host, agent="stopping")
            d.effects.append(t.StopAgent(host.name, host.leaving or f"host {host.name} is gone from discovery"))
    _start_workers(d, [d.hosts[host.name] for host in hosts if host.name in usable], holders, waits)
    bound_boots(d)  # once more: the deadlines of those just started


def _stop_strangers(d: Draft, held: Set[t.SlotId]) -> None:
    """Workers outside the present world that nobody wants: leavers, and behind the gate all. Not a leaver that boots
    where the newest commit is ``held``."""
    finishing = isinstance(d.phase, Finishing)
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
    if not d.generation or isinstance(d.phase, Finishing):
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


def _free_slots(d: Draft, host: Host) -> Iterator[tuple[t.SlotId, float]]:
    """The seats of a host in which a worker may be started, with the time from when on."""
    for index in range(host.slots):
        seat = t.SlotId(host.name, index)
        slot = d.slots.get(seat)
        if slot is None:
            yield seat, -inf
        elif slot.worker is None and not slot.finished:
            yield seat, slot.not_before


def _taken_seats(d: Draft) -> int:
    finished = 0 if d.ledger.ever_ready else sum(slot.finished for slot in d.slots.values())
    return finished + sum(not (worker.leaving or worker.gone) for worker in d.workers.values())


def _usable_hosts(d: Draft, hosts: list[Host], holders: set[str], waits: bool) -> set[str]:
    """Hosts on which something may be started: cooldown refuses, unless the job would be below min_np (I5), or
    ``waits`` for what is in the memory of these ``holders``. One of those that had notice is used once more."""
    usable = {host.name for host in hosts if _wanted(host) or (host.slots and host.name in holders)}
    cooling = [host for host in hosts if host.name in usable and host.cooldown_until > d.now]
    if not cooling:
        return usable
    usable.difference_update(host.name for host in cooling)
    warm = [host for host in hosts if host.name in usable and not host.leaving]
    enough = _taken_seats(d) + sum(1 for host in warm for _ in _free_slots(d, host))
    for host in sorted(cooling, key=lambda host: (host.cooldown_until, host.order)):
        if enough < d.policy.min_np or (waits and host.name in holders):
            enough += 0 if host.leaving else sum(1 for _ in _free_slots(d, host))
            if d.due(host.gives_way_at):
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
    joined = [host for host in hosts if host.agent == "joined"]
    free = [found for host in joined for found in _free_slots(d, host) if not host.leaving or found[0] in order]
    free.sort(key=lambda found: order.get(found[0], len(order)))
    for seat, not_before in free:
        if room <= 0 and not (beyond and seat in newest):
            return
        if d.due(not_before):
            _start_worker(d, seat)
            beyond = beyond and seat not in newest
            room -= 1


def _start_worker(d: Draft, seat: t.SlotId) -> None:
    incarnation = d.slots[seat].incarnation + 1 if seat in d.slots else 1
    leaving = d.hosts[seat.host].leaving
    worker = Worker(
        t.WorkerId(*seat, incarnation), started_at=d.now, leaving=leaving, leaving_at=d.now if leaving else inf
    )
    d.workers[worker.id] = worker
    d.put_slot(seat, incarnation=incarnation, worker=worker.id)
    d.effects.append(t.StartWorker(worker.id))
    d.note("worker_started", worker=str(worker.id), host=seat.host, slot=seat.slot)
