"""The activity of a job, derived from the core's state. The account of time (time_account.py) adds up activities."""

from __future__ import annotations

from elasticstate.core.records import Draft, Forming, Host, Running, Together, Waiting
from elasticstate.core.time_account import Activity


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
            trains = all(member.place == "train" for member in d.members())
            return "no_ticks" if trains else "world_formation"
        case Together():
            return "no_ticks"
        case _:
            return "exit"


def of_planned_end(phase: Forming) -> Activity:
    """Return the activity between two worlds."""
    return "drain" if phase.drains else "regroup"


def _slots_counted_on(d: Draft) -> int:
    """Return the number of slots on hosts that may be used, and of workers on other hosts that stay."""
    usable = {host.name: host.slots for host in d.hosts.values() if _is_usable(d, host)}
    others = (w for w in d.workers.values() if w.id.host not in usable and not (w.draining or w.gone))
    return sum(usable.values()) + sum(1 for _ in others)


def _is_usable(d: Draft, host: Host) -> bool:
    """Return True if workers live on the host, or may be started there without a wait for the host."""
    return (
        host.slots > 0
        and not host.draining
        and not host.loss
        and host.agent != "stopping"
        and host.cooldown_until <= d.now
    )
