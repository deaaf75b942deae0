"""What a failure costs the slot and the host it happened on: how long they are left alone, and what is forgiven."""

from __future__ import annotations

from collections.abc import Iterable

from elasticstate.core import types as t
from elasticstate.core.cooldown import FAILURES_IN_A_ROW, MAX_BACKOFF_S, SAME_DEATH_S, backoff_s, cooldown_s, patience_s
from elasticstate.core.records import Draft, Host, Worker


def host_is_lost(d: Draft, host: Host, workers: Iterable[Worker], reason: str, notice: str) -> None:
    """Its agent is gone, and these ``workers`` with it: the host is left alone, whatever it did before. With a
    ``notice`` that was to be expected."""
    host = _forgive(d, host, any(_has_done_well(d, worker) for worker in workers))
    if not notice:
        _cool_down(d, host, f"its agent was lost: {reason}")


def rest(d: Draft, host: Host, reason: str) -> None:
    """A host that had notice is left alone: discovery may go on naming it until it is gone. As a cooldown does, this
    gives way when the job would be below min_np, each time a while later: who asks it may hear the same notice."""
    until = max(host.cooldown_until, d.now + d.policy.preemption_rest_s)
    gives_way_at = min(until, d.now + patience_s(host.notices + 1, d.time_to_give_up_s()))
    d.put_host(host, notices=host.notices + 1, cooldown_until=until, cooldown_reason=reason, gives_way_at=gives_way_at)
    d.note("host_cooldown", host=host.name, seconds=round(until - d.now, 3), reason=reason)


def slot_failed(d: Draft, worker: Worker, cause: t.RootCause) -> None:
    """Count a failure of the slot, and a death of the host."""
    slot = d.slots[worker.id.seat]
    done_well = _has_done_well(d, worker)
    failures = 1 if done_well else slot.failures + 1
    first = cause if failures == 1 else slot.failure
    d.put_slot(
        worker.id.seat,
        failures=failures,
        failure=first,
        not_before=d.now + backoff_s(failures, str(worker.id.seat)),
        gives_way_at=d.now + patience_s(failures, d.time_to_give_up_s()),
    )
    if d.generation == 0 and d.ledger.outage is None:
        d.account(outage=cause)
    _host_had_a_death(d, _forgive(d, d.hosts[worker.id.host], done_well), worker.id.slot, cause)


def _host_had_a_death(d: Draft, host: Host, slot: int, cause: t.RootCause) -> None:
    """One slot that fails again and again is no reason to refuse its host, as long as another one there is well."""
    host = d.put_host(host, dead_slots=host.dead_slots | {slot})
    if d.now - host.last_death <= SAME_DEATH_S:
        return
    host = d.put_host(host, deaths=host.deaths + 1, last_death=d.now)
    if host.deaths >= FAILURES_IN_A_ROW and (len(host.dead_slots) > 1 or not _is_well(d, host)):
        _cool_down(d, host, f"{host.deaths} deaths in a row, the last: {cause.reason}")


def _is_well(d: Draft, host: Host) -> bool:
    """Whether a worker there is READY or in a world."""
    slots = (d.slots.get(t.SlotId(host.name, index)) for index in range(host.seats))
    workers = (d.workers[slot.worker] for slot in slots if slot is not None and slot.worker is not None)
    return any(not worker.gone and (worker.joined or worker.ready is not None) for worker in workers)


def _has_seen_a_commit(d: Draft, worker: Worker) -> bool:
    """Whether the job has made a commit while this worker was in its worlds: what failed before is history."""
    highest = d.ledger.highest
    return highest is not None and 0 < worker.first_joined <= highest.generation


def _has_done_well(d: Draft, worker: Worker) -> bool:
    """Whether what failed in its slot and on its host before is forgiven, by a commit or by time."""
    return _has_seen_a_commit(d, worker) or d.now - worker.ready_at >= _long_s(d)


def _cool_down(d: Draft, host: Host, reason: str) -> None:
    seconds = cooldown_s(host.name, host.cooldowns, d.policy.cooldown_min_s, d.policy.cooldown_max_s)
    until = max(host.cooldown_until, d.now + seconds)
    count = host.cooldowns + 1
    reason += f" (cooldown {count} in a row)" if count > 1 else ""
    d.put_host(
        host,
        cooldowns=count,
        cooldown_until=until,
        cooldown_reason=reason,
        gives_way_at=min(until, d.now + patience_s(count, d.time_to_give_up_s())),
    )
    d.note("host_cooldown", host=host.name, seconds=round(until - d.now, 3), reason=reason)


def _forgive(d: Draft, host: Host, has_done_well: bool) -> Host:
    """A host starts anew when a worker there has done well, or nothing was wrong for a long time."""
    quiet_since = max(host.last_death, host.cooldown_until)
    if has_done_well or d.now - quiet_since >= _long_s(d):
        return d.put_host(host, deaths=0, dead_slots=frozenset(), cooldowns=0)
    return host


def _long_s(d: Draft) -> float:
    """When all went well for so long, it was not the slot's or the host's fault: as long as they are left alone."""
    return max(MAX_BACKOFF_S, d.policy.cooldown_max_s)
