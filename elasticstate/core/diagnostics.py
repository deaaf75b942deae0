"""Diagnostics: what the job waits for, and why. Texts of notices, errors and ``elasticrun status``; read-only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elasticstate.core import links
from elasticstate.core.commits import awaited
from elasticstate.core.health import stall_lines, standstill_line
from elasticstate.core.ids import SlotId
from elasticstate.core.sharded import awaited_copies
from elasticstate.core.state import (
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
    living_members,
)
from elasticstate.core.types import SHOWN, listed, number_of


def names(workers: Sequence[Worker]) -> str:
    """Return ``a:0#1 (rank 0), b:1#2``: the first sixteen workers, and the number of the others."""
    shown = [f"{w.id} (rank {w.rank})" if w.rank is not None else str(w.id) for w in workers[:SHOWN]]
    return listed(shown, count=len(workers))


def leavers(m: Draft | Membership) -> list[Worker]:
    """Return the workers whose exits are awaited, because the core has told them to leave or to stop."""
    return [worker for worker in m.workers.values() if worker.gone == "stopped"]


def waiting_for(m: Draft | Membership, now: float) -> tuple[str, ...]:
    """Return one line for each host, slot or worker that the job waits for now. Return () while all members train."""
    members = living_members(m)
    match m.phase:
        case Waiting(retained_since=retained_since):
            holders = [f"{slot_id} retains the newest commit {commit}" for slot_id, commit in awaited(m)]
            holders += [
                f"host {copy.host} has shards of {copy.slot} of commit {copy.commit}" for copy in awaited_copies(m)
            ]
            return (*(holders if retained_since is not None else ()), *missing(m, now))
        case Forming(ended=ended):
            late = [w for w in members if w.ready is None and not w.late]
            still = filter(None, (standstill_line(m, now),))
            return (*still, *(f"{w.id} has not left generation {ended}" for w in late))
        case Running(gate_since=gate_since) as phase:
            suspects = [f"the verdict on the error of {w.id} is pending" for w in members if w.suspect_at is not None]
            inside = [w for w in members if w.in_gate]
            outside = [f"{w.id} is not in the exit gate" for w in members if not w.in_gate]
            gate = outside if inside and gate_since is not None else ()
            still = filter(None, (standstill_line(m, now),))
            return (*still, *suspects, *gate, *stall_lines(m, phase, now))
        case Finishing():
            return tuple(f"{w.id} has not exited" for w in members or leavers(m))
        case _:
            return ()


def missing(m: Draft | Membership, now: float) -> Iterator[str]:
    """Yield, host by host, the hosts and slots that are not READY, with their last report."""
    slots = sum(host.slots for host in m.hosts.values())
    if m.hosts and slots < m.policy.fewest(m.generation):
        yield f"too few slots: the hosts have {number_of(slots, 'slot')}, {m.policy.fewest_text(m.generation)}"
    yield from links.lines(m, now)
    for host in hosts_of(m):
        if not host.slots:
            yield f"host {host.name}: {'has 0 slots in discovery' if host.is_named else 'removed by discovery'}"
            continue
        if host.slots_ever > host.slots:
            yield f"host {host.name}: discovery removed {host.slots_ever - host.slots} of {host.slots_ever} slots"
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
        yield "no hosts: discovery named no host, and no agent connected"


def spares(m: Draft | Membership) -> list[Worker]:
    """Return the READY workers that a world that trains does not need: they wait to fill a gap."""
    if not isinstance(m.phase, Running) or m.world is None or not (m.ready if isinstance(m, Draft) else m.count.ready):
        return []
    apart = links.cut_off(m).union(m.ledger.links.apart)
    ready = [w for w in m.workers.values() if w.ready is not None and not (w.gone or w.draining or w.id.host in apart)]
    stay = sum(not member.draining for member in living_members(m))
    return ready if m.policy.fitting(stay + len(ready)) <= stay else []


def spares_text(m: Draft | Membership) -> str:
    """Return which workers wait as spares, and why, for the reason of a world that trains; "" without spares."""
    found = spares(m)
    waits = "waits as a spare" if len(found) == 1 else "wait as spares"
    return (
        f"; {listed([str(w.id) for w in found])} {waits}: {m.policy.why_spare(len(living_members(m)))}" if found else ""
    )


def hosts_in_cooldown(m: Membership, now: float) -> Iterator[str]:
    """Yield one line for each host in cooldown: why its agent was lost, the remaining seconds and the reason."""
    for host in hosts_of(m):
        if host.slots and host.cooldown_until > now:
            lost = f"agent {host.loss}, " if host.loss else ""
            yield f"host {host.name}: {lost}{_cooldown(host, now)}"


def _about_host(m: Draft | Membership, host: Host, now: float) -> str:
    if host.draining:
        return f"host {host.name} drains: {host.draining}"
    cooldown = _cooldown(host, now)
    check = f"its health check runs for {now - host.checked_at:.1f} s" if host.health == "checking" else ""
    if host.agent == "joined" and any((host.name, index) in m.slots for index in range(host.slots)):
        report = ""  # the lines of its slots contain the rest
    elif not host.report:
        report = "no report yet"
    else:
        lack = {"asked": ", not connected yet", "joined": ", no worker started yet"}.get(host.agent, "")
        report = f"{host.report} ({now - host.reported_at:.1f} s ago{lack})"
        report += f", the last agent {host.loss}" if host.agent == "asked" and host.loss else ""
    about = ", ".join(filter(None, (report, check, cooldown)))
    return f"host {host.name}: {about}" if about else ""


def _cooldown(host: Host, now: float) -> str:
    if host.cooldown_until <= now:
        return ""
    return f"in cooldown for {host.cooldown_until - now:.1f} s: {host.cooldown_reason}"


def _about_slot(m: Draft | Membership, slot: Slot, now: float) -> str:
    worker = m.workers.get(slot.worker) if slot.worker is not None else None
    if worker is None:
        return why_empty(slot, now)
    if worker.gone:
        return "is stopping"
    if worker.draining:
        return f"drains: {worker.draining}"
    if worker.ready is not None:
        return ""
    if worker.joined:
        return f"has not left generation {worker.joined}"
    return f"is booting for {now - worker.started_at:.1f} s, {last_heartbeat(worker, now)}"


def why_empty(slot: Slot, now: float) -> str:
    """Return why a slot has no worker."""
    if slot.finished:
        return "has finished"
    if slot.barred:
        return "is not used any more: a new worker could not load the state of the job"
    if slot.failure is None and slot.not_before > now:
        return f"its worker was drained as a straggler (restart in {slot.not_before - now:.1f} s)"
    if slot.failure is None:
        return "has no worker any more" if slot.incarnation else "has had no worker yet"
    times = "failed" if slot.failures == 1 else f"failed {slot.failures} times in a row"
    restart = f" (restart in {slot.not_before - now:.1f} s)" if slot.not_before > now else ""
    return f"{times}: {slot.failure.reason}{restart}"


def last_heartbeat(worker: Worker, now: float) -> str:
    """Return when the worker sent its last heartbeat or message."""
    if worker.reported_at < worker.started_at:
        return "no heartbeat yet"
    return f"last heartbeat {now - worker.reported_at:.1f} s ago"
