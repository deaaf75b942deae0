"""I7: from every state, if the workers answer, a world or an end is reached before the sum of the named time-outs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from elasticstate.core import types as t
from elasticstate.core.slots import lease_s
from elasticstate.core.state import (
    Finishing,
    Forming,
    Membership,
    Over,
    Running,
)
from elasticstate.core.step import next_deadline, step
from tests.kit.simulation.schedules import rubbish


def world_or_end_is_reached(m: Membership, now: float, *, one_is_deaf: bool) -> None:
    """Answer all messages of the core, starting in ``m``. A running world is broken first. With ``one_is_deaf`` one
    member never answers."""
    policy = m.policy
    bound = now + policy.start_timeout_s + policy.elastic_timeout_s + policy.regroup_timeout_s + policy.join_window_s
    bound += lease_s(policy)
    if isinstance(m.phase, Running):
        member = next(w for w in m.workers.values() if w.joined == m.generation and not w.gone)
        m, effects, _ = step(m, t.WorkerExited(member.id, 1, None, 9), now)
        if any(isinstance(effect, t.World) for effect in effects):
            return
    members = [w for w in m.workers.values() if w.joined == m.generation > 0 and not w.gone]
    deaf = None
    if one_is_deaf and len(members) > 1 and not isinstance(m.phase, Finishing):
        deaf = next((w.id for w in members if w.ready is None), None)
    while not isinstance(m.phase, Over):
        answers = tuple(_answers(m, deaf))
        if not answers:
            deadline = next_deadline(m)
            assert deadline is not None, f"{m.phase_name} waits for ever"
            now = deadline
            assert now <= bound, f"{m.phase_name} waits for too long"
        m, effects, _ = step(m, t.Several(answers), now)
        if any(isinstance(effect, t.World) for effect in effects):
            return


def _answers(m: Membership, deaf: t.WorkerId | None) -> Iterator[t.Event]:
    for host in m.hosts.values():
        if host.agent == "asked":
            yield t.AgentJoined(host.name)
        elif host.agent == "stopping":
            yield t.AgentLost(host.name, "exited with 0")
        if host.health == "checking":
            yield t.HealthChecked(host.name)
    for name in m.ledger.links.asked:
        yield t.LinksProbed(name, m.ledger.links.number)
    for worker in m.workers.values():
        if worker.id == deaf:
            continue
        if worker.gone or (isinstance(m.phase, Finishing) and worker.joined == m.generation):
            yield t.WorkerExited(worker.id, 1, 0, None)
        elif worker.confirmed_at is not None:
            yield t.WorkerExited(worker.id, 1, 1, None)
        elif worker.ready is None and not isinstance(m.phase, Running):
            commit = worker.commit
            if isinstance(m.phase, Forming) and m.phase.at_tick is not None and worker.joined == m.generation:
                commit = t.CommitId(m.phase.ended, m.phase.at_tick)
            yield t.FromWorker(worker.id, t.Ready(worker.joined, commit, None, f"{worker.id}:1"))


def stale_facts_have_no_effect(rng: random.Random, m: Membership, now: float) -> None:
    """Check I1: events of older incarnations, other generations and unknown workers have no effect. Nor has
    TimePassed before the deadline."""
    again = step(m, t.TimePassed(), now)
    assert not again.effects, again.effects
    assert replace(again.next, deadlines=m.deadlines) == m
    assert (next_deadline(m) or inf) <= (next_deadline(again.next) or inf), "a deadline was missed"
    deadline = next_deadline(m)
    early = now + 0.999 * rng.random() * ((now + 100 if deadline is None else deadline) - now)
    if deadline is None or early < deadline:  # they are equal if the deadline is one rounding error away
        before = step(m, t.TimePassed(), early)
        assert not before.effects, f"before the deadline: {before.effects}"
        assert replace(before.next, deadlines=m.deadlines) == m, "the state changes before its deadline"
    worker = rng.choice(list(m.workers) or [t.WorkerId("a", 0, 1)])
    stranger = rng.choice((worker._replace(incarnation=worker.incarnation - 1), t.WorkerId("z", 0, 1)))
    was_member = m.world is not None and any(placement.worker == stranger for placement in m.world.members)
    for event in rubbish(stranger, m.generation, t.CommitId(m.generation, 1)):
        body = event.body if isinstance(event, t.FromWorker) else None
        if was_member and isinstance(body, t.Attached):
            continue  # others may have committed since its report, which is late
        stale = step(m, event, now)
        if isinstance(event, t.AgentJoined) and not isinstance(m.phase, Over):  # an agent of no host must be stopped
            assert [(type(effect), getattr(effect, "host", "")) for effect in stale.effects] == [(t.StopAgent, "z")]
        else:
            assert not stale.effects, (event, stale.effects)
        assert replace(stale.next, deadlines=m.deadlines) == m, event
    for event in rubbish(worker, m.generation + 1, t.CommitId(1, 0)):
        if isinstance(event, t.FromWorker) and isinstance(
            event.body, t.Ready | t.HoldAnswer | t.GenerationFailure | t.Gate | t.First | t.Attached | t.CallReport
        ):
            assert replace(step(m, event, now).next, deadlines=m.deadlines) == m, event
