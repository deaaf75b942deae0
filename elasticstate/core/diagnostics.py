"""Diagnostics: what the job waits for, and why. Texts of notices, errors and ``elasticrun status``; read-only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elasticstate.core.records import (
    Draft,
    Finishing,
    Forming,
    Host,
    Membership,
    Running,
    Slot,
    Waiting,
    Worker,
    by_discovery as hosts_of,
)
from elasticstate.core.retained import awaited
from elasticstate.core.types import SlotId

SHOWN = 16


def names(workers: Sequence[Worker]) -> str:
    """Return ``a:0#1 (rank 0), b:1#2``: the first sixteen workers, and the number of the others."""
    shown = [f"{w.id} (rank {w.rank})" if w.rank is not None else str(w.id) for w in workers[:SHOWN]]
    return ", ".join(shown + _more(workers))


def listed(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:SHOWN] + _more(items))


def _more(items: Sequence[object]) -> list[str]:
    return [f"and {len(items) - SHOWN} more"] if len(items) > SHOWN else []


def members_of(m: Draft | Membership) -> list[Worker]:
    """Return the living members of the newest world, by rank."""
    if m.world is None:
        return []
    generation = m.world.generation
    found = (m.workers.get(placement.worker) for placement in m.world.members)
    return [w for w in found if w is not None and w.joined == generation and not w.gone]


def waiting_for(m: Draft | Membership, now: float) -> tuple[str, ...]:
    """Return one line for each host, slot or worker that the job waits for now. Return () while all members train."""
    members = members_of(m)
    match m.phase:
        case Waiting(retained_since=retained_since):
            held = [f"{slot_id} holds the newest commit {commit} in its memory" for slot_id, commit in awaited(m)]
            return (*(held if retained_since is not None else ()), *missing(m, now))
        case Forming():
            return tuple(f"{w.id} has not left its generation" for w in members if w.ready is None and not w.late)
        case Running(gate_since=gate_since):
            suspects = [f"{w.id} waits for the verdict on its error" for w in members if w.suspect_at is not None]
            inside = [w for w in members if w.in_gate]
            outside = [f"{w.id} is not in the exit gate" for w in members if not w.in_gate]
            return (*suspects, *(outside if inside and gate_since is not None else ()))
        case Finishing():
            return tuple(f"{w.id} has not exited" for w in members)
        case _:
            return ()


def missing(m: Draft | Membership, now: float) -> Iterator[str]:
    """Yield, host by host, the hosts and slots that are not READY, with their last report."""
    slots = sum(host.slots for host in m.hosts.values())
    if m.hosts and slots < m.policy.min_np:
        yield f"too few slots: the hosts have {slots}, and {m.policy.min_np} workers are needed"
    for host in hosts_of(m):
        if not host.slots:
            yield f"host {host.name}: {'named with 0 slots' if host.is_named else 'gone from discovery'}"
            continue
        if host.slots_ever > host.slots:
            taken = host.slots_ever - host.slots
            yield f"host {host.name}: discovery has taken away {taken} of its {host.slots_ever} slots"
        about = _about_host(m, host, now)
        if about:
            yield about
        for index in range(host.slots):
            slot_id = SlotId(host.name, index)
            slot = m.slots.get(slot_id)
            text = _about_slot(m, slot, now) if slot is not None else ""
            if text:
                yield f"{slot_id} {text}"
    if not m.hosts:
        yield "no hosts: none was ever named by discovery, and no agent has dialled in"


def left_alone(m: Membership, now: float) -> Iterator[str]:
    """Yield one line for each host in cooldown: the remaining seconds and the reason."""
    for host in hosts_of(m):
        if host.slots and host.cooldown_until > now:
            yield f"host {host.name}: {_cooldown(host, now)}"


def _about_host(m: Draft | Membership, host: Host, now: float) -> str:
    if host.draining:
        return f"host {host.name} leaves: {host.draining}"
    cooling = _cooldown(host, now)
    if host.agent == "joined" and any((host.name, index) in m.slots for index in range(host.slots)):
        heard = ""  # the lines of its slots contain the rest
    elif not host.heard:
        heard = "nothing was heard of it"
    else:
        since = {"asked": ", nothing was heard since", "joined": ", no worker was started yet"}
        heard = f"{now - host.heard_at:.1f} s ago {host.heard}{since.get(host.agent, '')}"
    return f"host {host.name}: {', '.join(filter(None, (heard, cooling)))}" if heard or cooling else ""


def _cooldown(host: Host, now: float) -> str:
    if host.cooldown_until <= now:
        return ""
    return f"in cooldown for {host.cooldown_until - now:.1f} s: {host.cooldown_reason}"


def _about_slot(m: Draft | Membership, slot: Slot, now: float) -> str:
    worker = m.workers.get(slot.worker) if slot.worker is not None else None
    if worker is None:
        if slot.finished:
            return "has finished"
        if slot.failure is None:
            return "is free"
        again = f", restart in {slot.not_before - now:.1f} s" if slot.not_before > now else ""
        return f"{failed_times(slot)}: {slot.failure.reason}{again}"
    if worker.gone:
        return "is being stopped"
    if worker.draining:
        return f"leaves: {worker.draining}"
    if worker.ready is not None:
        return ""
    if worker.joined:
        return f"has not left generation {worker.joined}"
    return f"boots for {now - worker.started_at:.1f} s, {_last_heard(worker, now)}"


def failed_times(slot: Slot) -> str:
    return "failed" if slot.failures == 1 else f"failed {slot.failures} times in a row"


def _last_heard(worker: Worker, now: float) -> str:
    if worker.heard_at < worker.started_at:
        return "nothing heard of it"
    return f"last heard {now - worker.heard_at:.1f} s ago"
