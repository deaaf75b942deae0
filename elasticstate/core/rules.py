"""The decisions: one rule per phase (the form of etcd's raft), each in a module of its own; ends are in ending.py.

A rule compares the draft and the time with its conditions, makes the first transition that applies, and writes the
reason to ``d.reason``. Beside each rule, a function yields the deadlines of its phase. A rule and its deadlines use the
same predicates, so TimePassed at a deadline changes the rule's result.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticstate.core.forming import forming, forming_deadlines
from elasticstate.core.plain import together, together_deadlines
from elasticstate.core.records import Draft, Finishing, Forming, Over, Running, Stopping, Together, Waiting
from elasticstate.core.running import (
    finishing,
    finishing_deadlines,
    running,
    running_deadlines,
    stop_job,
    stopping,
    stopping_deadlines,
)
from elasticstate.core.stall_check import end_stalls
from elasticstate.core.standstill import end_standstill
from elasticstate.core.stragglers import end_stragglers
from elasticstate.core.waiting import waiting, waiting_deadlines


def decide(d: Draft) -> None:
    """Apply the rule of the phase until the phase does not change any more."""
    if d.stopped_by:
        stop_job(d, d.stopped_by)
    while True:
        before = d.phase
        match before:
            case Waiting():
                waiting(d, before)
            case Forming():
                forming(d, before)
            case Running():
                running(d, before)
                if isinstance(d.phase, Forming | Finishing):
                    end_stalls(d, before)
                    end_stragglers(d, before)
            case Stopping():
                stopping(d, before)
            case Finishing():
                finishing(d, before)
            case Together():
                together(d, before)
            case Over():
                return
        end_standstill(d)
        d.broken = []
        if d.phase is before:
            return


def deadlines_of_phase(d: Draft) -> Iterator[tuple[str, float]]:
    """Yield the times, by name, at which the rule of the present phase may decide otherwise; some may have passed."""
    match d.phase:
        case Waiting():
            yield from waiting_deadlines(d, d.phase)
        case Forming():
            yield from forming_deadlines(d, d.phase)
        case Running():
            yield from running_deadlines(d, d.phase)
        case Stopping():
            yield from stopping_deadlines(d, d.phase)
        case Finishing():
            yield from finishing_deadlines(d, d.phase)
        case Together():
            yield from together_deadlines(d, d.phase)
