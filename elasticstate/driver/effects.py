"""Effects: carries out the effects of the core."""

from __future__ import annotations

import msgspec

from elasticstate.backends import DriverBackend
from elasticstate.core import types as t
from elasticstate.core.state import Running
from elasticstate.driver import spec
from elasticstate.driver.agents import Agents
from elasticstate.driver.job import EventQueue, JobState, Journal
from elasticstate.driver.report import Outcome, Report
from elasticstate.net.messages import (
    ReplicateOrder,
    ToWorkers,
)
from elasticstate.options import Options


class Effects:
    """Executor of the core's effects: messages to agents and workers, events, and the outcome of the job."""

    def __init__(
        self,
        job: str,
        options: Options,
        agents: Agents,
        backend: DriverBackend,
        state: JobState,
        queue: EventQueue,
        journal: Journal,
        report: Report,
    ) -> None:
        self._job = job
        self._options = options
        self._agents = agents
        self._backend = backend
        self._state = state
        self._queue = queue
        self._journal = journal
        self._report = report

    def carry_out(self, effect: t.Effect) -> None:
        agents = self._agents
        match effect:
            case t.Note(name, fields):
                self._journal.core_event(name, dict(fields))
            case t.StartAgent(host):
                agents.start(host)
            case t.StopAgent(host, reason):
                agents.stop_host(host, reason)
            case t.StartWorker(worker):
                agents.send(worker.host, self._complete(effect))
            case t.StopWorker(worker):
                self._report.expect_end(worker)
                agents.send(worker.host, effect)
            case t.Leave(worker):
                self._report.expect_end(worker)
                agents.send(worker.host, ToWorkers((worker,), effect))
            case t.Terminate():
                for worker in self._state.membership.workers:
                    self._report.expect_end(worker)
                agents.broadcast(effect)
            case t.Hold() | t.Release() | t.End() | t.OpenGate() | t.AskWhere():
                agents.broadcast(effect)
            case t.WatchCalls() | t.StopReplication():
                agents.send_to_all(effect)
            case t.ConfirmOwnError(worker):
                agents.send(worker.host, ToWorkers((worker,), effect))
            case t.Sever(worker, generation, cause):
                agents.send(worker.host, ToWorkers((worker,), t.End(generation, None, cause)))
            case t.Replicate(commit, copies):
                self._replicate(commit, copies)
            case t.ForgetCopies(host=host):
                agents.send(host, effect) if host else agents.send_to_all(effect)
            case t.PublishWorld(world):
                self._publish(world)
            case t.EndJob(succeeded, cause):
                ended = Outcome(0 if succeeded else 1, "succeeded" if succeeded else "failed", cause)
                self._state.outcome = self._state.stopped or ended

    def _complete(self, effect: t.StartWorker) -> t.StartWorker:
        """Return the message with all that the core does not know."""
        place = effect.place
        if place is not None:
            place = msgspec.structs.replace(place, store=self._state.stores.get(place.store_host, ""))
        m, size = self._state.membership, self._state.size_for_newcomers()
        is_shared = m.policy.one_copy_per_host  # most workers need no commit storage
        members = m.world.members if m.world is not None else ()
        has_keeper = is_shared and any(member.worker.host == effect.worker.host for member in members)
        fit_bytes = size if isinstance(m.phase, Running) and not has_keeper else 0
        return msgspec.structs.replace(effect, reserve_bytes=0 if is_shared else size, place=place, fit_bytes=fit_bytes)

    def _replicate(self, commit: t.CommitId, copies: tuple[tuple[t.SlotId, str], ...]) -> None:
        """Send each agent the orders for its slots."""
        servers = self._state.copy_servers
        targets: dict[str, list[tuple[t.SlotId, str, str]]] = {}
        for slot_id, host in copies:
            address = servers.get(host, "")
            if address or host == slot_id.host:
                targets.setdefault(slot_id.host, []).append((slot_id, host, address))
            else:
                self._queue.post(t.CopyDropped(host, slot_id, commit, "its agent serves no copies"))
        for host, its in targets.items():
            self._agents.send(host, ReplicateOrder(commit, tuple(its)))

    def _publish(self, world: t.World) -> None:
        workers = self._state.membership.workers.values()
        self._backend.before_world(worker.id for worker in workers if worker.late)
        spec.spare_garbage_collection(world.size)
        for host, worlds in spec.world_messages(self._job, world, self._options, self._state.copy_servers):
            self._agents.send(host, worlds)
