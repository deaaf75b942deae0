"""The core's interface: ``step(membership, event, now)`` decides. Pure, total, deterministic; no clock, socket, thread.

::

    m = new_membership(policy)
    m, effects, reason = step(m, HostsDiscovered(...), now)      # carry the effects out, in their order
    ...
    step(m, TimePassed(), next_deadline(m))                      # when nothing else has happened by then

The time of one step is linear in the number of slots and independent of the number of events in the step: send events
that arrived together as Several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from elasticstate.core import running, state
from elasticstate.core.accounting import follow
from elasticstate.core.divergence import compare, comparison_deadlines
from elasticstate.core.facts import apply
from elasticstate.core.figures import TimeAccount
from elasticstate.core.health import end_stalls, end_standstill, end_stragglers
from elasticstate.core.links import link_deadlines, probe
from elasticstate.core.plain import round_deadlines, together
from elasticstate.core.policy import Policy
from elasticstate.core.sharded import replicate, replication_deadlines
from elasticstate.core.slots import mark_draining, slot_deadlines, start_and_stop, stop_overdue_boots
from elasticstate.core.types import Effect, Event, Shards
from elasticstate.core.waiting import forming, forming_deadlines, waiting, waiting_deadlines

# ---------------------------------------------------------------------------------------------------------------- rules
# The decisions: one rule per phase (the form of etcd's raft), in the modules of the phases. A rule
# compares the draft and the time with its conditions, makes the first transition that applies, and writes the reason
# to ``d.reason``. Beside each rule, a function yields the deadlines of its phase. A rule and its deadlines use
# the same predicates, so TimePassed at a deadline changes the rule's result.


def decide(d: state.Draft) -> None:
    """Apply the rule of the phase until the phase does not change any more."""
    if d.stopped_by:
        running.stop_job(d, d.stopped_by)
    while True:
        before = d.phase
        match before:
            case state.Waiting():
                waiting(d, before)
            case state.Forming():
                forming(d, before)
            case state.Running():
                running.running(d, before)
                if isinstance(d.phase, state.Forming | state.Finishing):
                    end_stalls(d, before)
                    end_stragglers(d, before)
            case state.Stopping():
                running.stopping(d, before)
            case state.Finishing():
                running.finishing(d, before)
            case state.Together():
                together(d, before)
            case state.Over():
                return
        end_standstill(d)
        d.broken = []
        if d.phase is before:
            return


def deadlines_of_phase(d: state.Draft) -> Iterator[tuple[str, float]]:
    """Yield the times, by name, at which the rule of the present phase may decide otherwise; some may have passed."""
    match d.phase:
        case state.Waiting():
            yield from waiting_deadlines(d, d.phase)
        case state.Forming():
            yield from forming_deadlines(d, d.phase)
        case state.Running():
            yield from running.running_deadlines(d, d.phase)
        case state.Stopping():
            yield from running.stopping_deadlines(d, d.phase)
        case state.Finishing():
            yield from running.finishing_deadlines(d, d.phase)
        case state.Together():
            yield from round_deadlines(d)


class Transition(NamedTuple):
    """Result of a step: the state after the step, the effects to carry out in this order, and the reason as a text."""

    next: state.Membership
    effects: tuple[Effect, ...]
    reason: str


def new_membership(policy: Policy, began_at: float | None = None) -> state.Membership:
    """Return a state without hosts, slots and workers. The start time-out counts from the first step.

    ``began_at``: the account of time begins here; None: with the first step.
    """
    ledger = state.Ledger(account=TimeAccount(since=began_at))
    return state.Membership(policy, state.Waiting(since=0.0), {}, {}, {}, None, ledger, {}, state.Count(), {}, Shards())


def step(m: state.Membership, event: Event, now: float) -> Transition:
    """Enter the event, then take one decision. ``now`` is the time of a monotonic clock, in seconds."""
    if isinstance(m.phase, state.Over):
        return Transition(m, (), "the job is over")
    d = state.Draft(m, now)
    if d.ledger.started_at is None:
        d.update_ledger(started_at=now)
        d.phase = state.Waiting(since=now)
        d.update_ledger(account=d.ledger.account.until(now))
    apply(d, event)
    compare(d)
    mark_draining(d)
    stop_overdue_boots(d)
    decide(d)
    start_and_stop(d)
    replicate(d)
    probe(d)
    follow(d)
    return Transition(d.freeze(_deadlines(d)), tuple(d.effects), d.reason)


def _deadlines(d: state.Draft) -> dict[str, float]:
    """Return the future deadlines, by name."""
    named = itertools.chain(
        deadlines_of_phase(d),
        slot_deadlines(d),
        replication_deadlines(d),
        link_deadlines(d),
        comparison_deadlines(d),
    )
    return {name: at for name, at in named if d.now < at < inf}


def next_deadline(m: state.Membership) -> float | None:
    """Return the earliest time at which TimePassed may change the state; None: only another event can change it."""
    return min(m.deadlines.values(), default=None)
