"""Conversion of workers' messages to events of the core."""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.exit_status import signal_name
from elasticstate.net import messages

_PLACES = {place: place.name.lower() for place in messages.Place}


def heartbeat(worker: t.WorkerId, stamp: messages.Stamp) -> t.Heartbeat:
    read = (stamp.generation, stamp.ticks, stamp.commit, stamp.commit_s, stamp.pace, stamp.previous)
    return t.Heartbeat(worker, _PLACES[stamp.place], *read, stamp.still_s, stamp.trained_s)


def event_of(worker: t.WorkerId, body: messages.FromWorkerBody) -> t.Event | None:
    """Return the event for a message; None if the core does not need the message."""
    match body:
        case messages.Ready(generation, commit, previous, store, ticks, paused_s, behind, sealed, names):
            last = (generation, commit, previous, store, ticks, paused_s, behind, sealed, names)
            return t.WorkerReady(worker, *last, body.commit_s, body.has_shards, body.trained_s)
        case messages.HoldAnswer(generation, ticks, in_gate, number):
            return t.HoldAnswered(worker, generation, ticks, in_gate, number)
        case messages.RunUsed():
            return t.WorkerUsesRun(worker)
        case messages.GenerationFailure(generation, certain, error, hang):
            return t.FailureReported(worker, generation, certain, error, hang)
        case messages.CollectivesReport():
            return t.CollectivesReported(worker, body)
        case messages.Gate(generation, commit_s):
            return t.GateEntered(worker, generation, commit_s)
        case messages.First(generation, train_s, sync_s):
            return t.FirstTick(worker, generation, train_s, sync_s)
        case messages.Attached(generation, digests):
            return t.ShardsAttached(worker, generation, digests)
        case messages.CallReport():
            return t.CallReported(worker, body)
        case messages.CommitSealed():
            return body if body.worker == worker else None
        case messages.WorkerPreemptionNotice(number):
            return t.WorkerDraining(worker, f"{signal_name(number)} to the worker")
    return None
