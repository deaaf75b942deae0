"""I7: from every state, if the workers answer, a world or an end is reached before the sum of the named time-outs."""

from __future__ import annotations

from collections.abc import Iterator

from elasticstate.core import partition, types as t
from elasticstate.core.membership import Membership, next_deadline, step
from elasticstate.core.records import Finishing, Forming, Over, Running


def world_or_end_is_reached(m: Membership, now: float, *, one_is_deaf: bool) -> None:
    """Answer all messages of the core, starting in ``m``. A running world is broken first. With ``one_is_deaf`` one
    member never answers."""
    policy = m.policy
    bound = now + policy.start_timeout_s + policy.elastic_timeout_s + policy.regroup_timeout_s + policy.join_window_s
    bound += partition.lease_s(policy)
    if isinstance(m.phase, Running):
        member = next(w for w in m.workers.values() if w.joined == m.generation and not w.gone)
        m, effects, _ = step(m, t.WorkerExited(member.id, None, 9), now)
        if any(isinstance(effect, t.PublishWorld) for effect in effects):
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
        if any(isinstance(effect, t.PublishWorld) for effect in effects):
            return


def _answers(m: Membership, deaf: t.WorkerId | None) -> Iterator[t.Event]:
    for host in m.hosts.values():
        if host.agent == "asked":
            yield t.AgentJoined(host.name)
        elif host.agent == "stopping":
            yield t.AgentLost(host.name, "exited with 0")
    for worker in m.workers.values():
        if worker.id == deaf:
            continue
        if worker.gone or (isinstance(m.phase, Finishing) and worker.joined == m.generation):
            yield t.WorkerExited(worker.id, 0, None)
        elif worker.confirmed_at is not None:
            yield t.WorkerExited(worker.id, 1, None)
        elif worker.ready is None and not isinstance(m.phase, Running):
            commit = worker.commit
            if isinstance(m.phase, Forming) and m.phase.at_tick is not None and worker.joined == m.generation:
                commit = t.CommitId(m.phase.ended, m.phase.at_tick)
            yield t.WorkerReady(worker.id, worker.joined, commit, None, f"{worker.id}:1")
