"""What workers say, as events of the core."""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.net import messages
from elasticstate.processes import signal_name

_PLACES = {place: place.name.lower() for place in messages.Place}


def heartbeat(worker: t.WorkerId, stamp: messages.Stamp) -> t.Heartbeat:
    return t.Heartbeat(worker, _PLACES[stamp.place], stamp.generation, stamp.ticks, stamp.commit)


def event_of(worker: t.WorkerId, body: messages.FromWorkerBody) -> t.Event | None:
    """None: it does not concern the core."""
    match body:
        case messages.Ready(generation, commit, previous, store, ticks, paused_s):
            return t.WorkerReady(worker, generation, commit, previous, store, ticks, paused_s)
        case messages.HoldAnswer(generation, ticks, in_gate, number):
            return t.HoldAnswered(worker, generation, ticks, in_gate, number)
        case messages.Failure(generation, certain, error):
            return t.FailureReported(worker, generation, certain, error)
        case messages.Gate(generation):
            return t.GateEntered(worker, generation)
        case messages.First(generation):
            return t.FirstTick(worker, generation)
        case messages.Committed(commit):
            return t.CommitSealed(worker, commit)
        case messages.Notice(number):
            return t.WorkerLeaving(worker, f"{signal_name(number)} to the worker")
    return None
