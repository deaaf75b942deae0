"""Workers on unreachable hosts: how long they may live on, and how the core takes survivors back."""

from __future__ import annotations

from math import inf

from elasticstate.core import types as t
from elasticstate.core.policy import LEASE_MARGIN, Policy
from elasticstate.core.state import Draft, Forming, Waiting, Worker


def lease_s(policy: Policy) -> float:
    """Return the seconds after the loss of its agent in which an unreachable worker may still train.

    In this time the agent detects the loss of the driver, waits for a driver, and kills the workers that do not stop.
    With ``--lease``, its ticks stop at the end of the lease.
    """
    if policy.lease_s is not None:
        return LEASE_MARGIN * policy.lease_s
    return LEASE_MARGIN * (policy.heartbeat_timeout_s + policy.driver_timeout_s + policy.stop_timeout_s)


def record_incarnation(d: Draft, worker: t.WorkerId) -> None:
    """Record a worker that an agent has reported as started, perhaps by an earlier driver."""
    host, slot = d.hosts[worker.host], d.slots.get(worker.slot_id)
    d.put_host(host, slots_ever=max(host.slots_ever, worker.slot + 1))
    if slot is None or slot.incarnation < worker.incarnation:
        d.put_slot(worker.slot_id, incarnation=worker.incarnation)


def take_back(d: Draft, worker: t.WorkerId, generation: int) -> None:
    """Take back a worker that lived on while its agent was unreachable. Its generation has ended, so the world does not
    wait for the worker."""
    if worker in d.workers:
        return
    if d.ledger.kind == "" and generation == 0:  # it has used run: else its place has a generation
        d.update_ledger(kind="elastic", round=None, first_user=worker)
    if d.ledger.kind != "elastic":
        _stop_returned(d, worker)
        return
    slot = d.slots[worker.slot_id]
    is_its_own = slot.worker is None and 0 < worker.incarnation == slot.incarnation
    if not is_its_own or not _is_over(d, generation):
        d.effects.append(t.StopWorker(worker, "its slot has another worker now", kill=True))
        return
    d.put_slot(worker.slot_id, worker=worker)
    members = d.world.members if d.world is not None and generation == d.generation else ()
    rank = next((placement.rank for placement in members if placement.worker == worker), None)
    lacked = d.world is not None and rank in d.world.lacking  # so the worker's commit may be older than its world
    keeps_own = d.world is None or rank is None or d.world.keeps(rank)
    late = generation > 0
    d.add(Worker(worker, started_at=d.now, joined=generation, rank=rank, lacked=lacked, keeps=keeps_own, late=late))
    if late:
        d.effects.append(t.Sever(worker, generation, f"host {worker.host} was unreachable"))


def _stop_returned(d: Draft, worker: t.WorkerId) -> None:
    """Stop a worker that cannot join another world, because it has read its place when it started."""
    slot = d.slots[worker.slot_id]
    d.effects.append(t.StopWorker(worker, "its world has ended", kill=True))
    if slot.worker is None and 0 < worker.incarnation == slot.incarnation:
        d.put_slot(worker.slot_id, worker=worker)
        d.add(Worker(worker, started_at=d.now, gone="stopped"))


def _is_over(d: Draft, generation: int) -> bool:
    """Return True if a generation has ended or is about to end: no worker may continue in it."""
    return generation < d.generation or (generation == d.generation and isinstance(d.phase, (Forming, Waiting)))


def may_train_on(d: Draft) -> bool:
    """Return True if all members of the newest world are unreachable, so that they may complete ticks unseen (I16).

    A single member that is known to have left the world, or to be dead, proves that the world stands still. With
    ``--lease`` this is no proof, because a tick does not need all members.
    """
    stands_still = d.ledger.is_broken and d.policy.lease_s is None
    return not stands_still and bool(unreachable_hosts(d))


def unreachable_hosts(d: Draft) -> list[str]:
    """Return the hosts on which members of the newest world may live on, until the last of them has given up."""
    hosts = [host.name for host in d.hosts.values() if host.may_live_until > -inf]
    return hosts if d.now < unreachable_until(d) else []


def unreachable_until(d: Draft) -> float:
    """Return the time at which the last unreachable worker has given up."""
    return max((host.may_live_until for host in d.hosts.values()), default=-inf)
