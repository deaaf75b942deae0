"""Workers on hosts out of reach: how long they may live on, and how they are taken back when they have."""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.core.policy import Policy
from elasticstate.core.records import Draft, Forming, Waiting, Worker

_MARGIN = 1.25  # clocks differ


def lease_s(policy: Policy) -> float:
    """For how long, after the loss of its agent, a worker out of reach may be at it: until its agent has noticed, has
    waited for a driver, and has killed those that do not stop; or, with ``--lease``, until its ticks stand still."""
    if policy.lease_s is not None:
        return _MARGIN * policy.lease_s
    return _MARGIN * (policy.heartbeat_timeout_s + policy.driver_timeout_s + policy.stop_timeout_s)


def has_been(d: Draft, worker: t.WorkerId) -> None:
    """Whoever is known to an agent was started, maybe by a driver before this one."""
    host, slot = d.hosts[worker.host], d.slots.get(worker.seat)
    d.put_host(host, seats=max(host.seats, worker.slot + 1))
    if slot is None or slot.incarnation < worker.incarnation:
        d.put_slot(worker.seat, incarnation=worker.incarnation)


def take_back(d: Draft, worker: t.WorkerId, generation: int) -> None:
    """It has lived on while its agent was out of touch. What it was in has ended: nobody waits for it any more."""
    if worker in d.workers:
        return
    slot = d.slots[worker.seat]
    is_its_own = slot.worker is None and 0 < worker.incarnation == slot.incarnation
    if not is_its_own or not _is_over(d, generation):
        d.effects.append(t.StopWorker(worker, "its slot is another worker's by now", kill=True))
        return
    d.put_slot(worker.seat, worker=worker)
    members = d.world.members if d.world is not None and generation == d.generation else ()
    rank = next((placement.rank for placement in members if placement.worker == worker), None)
    lacked = d.world is not None and rank in d.world.lacking  # so its commit may be older than its world
    late = generation > 0
    d.add(Worker(worker, started_at=d.now, joined=generation, rank=rank, lacked=lacked, late=late))
    if late:
        d.effects.append(t.Sever(worker, generation, f"host {worker.host} was out of reach"))


def _is_over(d: Draft, generation: int) -> bool:
    """Whether a generation has ended, or is about to: nobody is to go on in it."""
    return generation < d.generation or (generation == d.generation and isinstance(d.phase, (Forming, Waiting)))
