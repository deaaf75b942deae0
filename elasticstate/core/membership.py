"""Membership is decided here: ``step(membership, event, now)``. Pure, total, deterministic; no clock, socket or thread.

::

    m = new_membership(policy)
    m, effects, reason = step(m, HostsDiscovered(...), now)      # carry the effects out, in their order
    ...
    step(m, TimePassed(), next_deadline(m))                      # when nothing else has happened by then

One step costs time linear in the number of slots, however many facts come in it: send what arrived together as Several.
"""

from __future__ import annotations

from typing import NamedTuple

from elasticstate.core.facts import apply
from elasticstate.core.missing import waiting_for
from elasticstate.core.policy import Policy
from elasticstate.core.records import Count, Draft, Ledger, Membership, Over, Waiting
from elasticstate.core.rules import decide, watch_window
from elasticstate.core.seats import bound_boots, mark_leavers, start_and_stop
from elasticstate.core.types import Effect, Event

__all__ = ["Membership", "Transition", "new_membership", "next_deadline", "step", "waiting_for"]


class Transition(NamedTuple):
    """What a step says: the state after it, what is to be done, in this order, and why in plain words."""

    next: Membership
    effects: tuple[Effect, ...]
    reason: str


def new_membership(policy: Policy) -> Membership:
    """Nobody is known yet. The start time-out counts from the first step."""
    return Membership(policy, Waiting(since=0.0), {}, {}, {}, None, Ledger(), None, Count(), {})


def step(m: Membership, event: Event, now: float) -> Transition:
    """Enter the event, then take one decision. ``now`` is a monotonic clock's, in seconds."""
    if isinstance(m.phase, Over):
        return Transition(m, (), "the job is over")
    d = Draft(m, now)
    if d.ledger.started_at is None:
        d.account(started_at=now)
        d.phase = Waiting(since=now)
    apply(d, event)
    mark_leavers(d)
    bound_boots(d)
    decide(d)
    start_and_stop(d)
    watch_window(d)
    return Transition(d.freeze(), tuple(d.effects), d.reason)


def next_deadline(m: Membership) -> float | None:
    """The earliest time at which TimePassed would change something; None: only another event will."""
    return m.deadline
