"""Backoff of slots and cooldown of hosts after failures, and the conditions that clear their failure counters."""

from __future__ import annotations

from collections.abc import Iterable

from elasticstate.core import types as t
from elasticstate.core.cooldown import (
    FAILURES_IN_A_ROW,
    MAX_BACKOFF_S,
    SAME_DEATH_S,
    backoff_s,
    cooldown_s,
    patience_s,
    together_s,
)
from elasticstate.core.records import Draft, Host, Worker


def host_is_lost(d: Draft, host: Host, workers: Iterable[Worker], notice: str) -> None:
    """Start the cooldown of a host whose agent was lost together with ``workers``, whatever the host did before. After
    a preemption ``notice`` the loss was expected: no cooldown is started here."""
    host = _clear_failures(d, host, any(_has_done_well(d, worker) for worker in workers))
    if not notice:
        _cool_down(d, host, "its agent was lost")


def start_preemption_cooldown(d: Draft, host: Host, reason: str) -> None:
    """Start the preemption cooldown of a host: discovery may still name the host until it is gone. Like any cooldown,
    it gives way if the job would be below min_np without the host. Each time it gives way later, because a new agent
    may receive the same preemption notice."""
    until = max(host.cooldown_until, d.now + d.policy.preemption_cooldown_s)
    gives_way_at = min(until, d.now + patience_s(host.notices + 1, d.time_to_give_up_s()))
    d.put_host(host, notices=host.notices + 1, cooldown_until=until, cooldown_reason=reason, gives_way_at=gives_way_at)
    d.note("host_cooldown", host=host.name, seconds=round(until - d.now, 3), reason=reason)


def slot_failed(d: Draft, worker: Worker, cause: t.RootCause) -> None:
    """Count a failure of the slot, and a death on its host."""
    slot = d.slots[worker.id.slot_id]
    done_well = _has_done_well(d, worker)
    failures = 1 if done_well else slot.failures + 1
    first = cause if failures == 1 else slot.failure
    d.put_slot(
        worker.id.slot_id,
        failures=failures,
        failure=first,
        not_before=d.now + backoff_s(failures, str(worker.id.slot_id)),
        gives_way_at=d.now + patience_s(failures, d.time_to_give_up_s()),
    )
    if d.generation == 0 and d.ledger.outage is None:
        quiet_s = together_s(d.time_to_give_up_s()) if cause.exit_code else 0.0
        d.update_ledger(outage=cause, quiet_until=d.now + quiet_s)
    _host_had_a_death(d, _clear_failures(d, d.hosts[worker.id.host], done_well), worker.id.slot, cause)


def _host_had_a_death(d: Draft, host: Host, slot: int, cause: t.RootCause) -> None:
    """Count a death on the host. One slot that fails repeatedly does not put its host in cooldown while another slot
    of the host is well."""
    host = d.put_host(host, dead_slots=host.dead_slots | {slot})
    if d.now - host.last_death <= SAME_DEATH_S:
        return
    host = d.put_host(host, deaths=host.deaths + 1, last_death=d.now)
    if host.deaths >= FAILURES_IN_A_ROW and (len(host.dead_slots) > 1 or not _is_well(d, host)):
        _cool_down(d, host, f"{host.deaths} worker failures in a row, the last one: {cause.reason}")


def _is_well(d: Draft, host: Host) -> bool:
    """Return True if a worker on the host is READY or in a world."""
    slots = (d.slots.get(t.SlotId(host.name, index)) for index in range(host.slots_ever))
    workers = (d.workers[slot.worker] for slot in slots if slot is not None and slot.worker is not None)
    return any(not worker.gone and (worker.joined or worker.ready is not None) for worker in workers)


def _has_seen_a_commit(d: Draft, worker: Worker) -> bool:
    """Return True if the job has made a commit since this worker first joined a world: older failures do not count."""
    highest = d.ledger.highest
    return highest is not None and 0 < worker.first_joined <= highest.generation


def _has_done_well(d: Draft, worker: Worker) -> bool:
    """Return True if a commit or enough time without failures clears the earlier failures of the worker's slot and
    host."""
    return _has_seen_a_commit(d, worker) or d.now - worker.ready_at >= long_s(d)


def _cool_down(d: Draft, host: Host, reason: str) -> None:
    seconds = cooldown_s(host.name, host.cooldowns, *d.policy.cooldown_range_s)
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


def _clear_failures(d: Draft, host: Host, has_done_well: bool) -> Host:
    """Clear the failures of a host if one of its workers has done well, or if nothing has failed for a long time."""
    quiet_since = max(host.last_death, host.cooldown_until)
    if has_done_well or d.now - quiet_since >= long_s(d):
        return d.put_host(host, deaths=0, dead_slots=frozenset(), cooldowns=0)
    return host


def long_s(d: Draft) -> float:
    """Return the seconds without a failure that clear earlier failures: the longest backoff or cooldown."""
    return max(MAX_BACKOFF_S, *d.policy.cooldown_range_s)
