"""AgentMessages: handles the messages that the driver receives from agents."""

from __future__ import annotations

import asyncio

from elasticstate.backends import DriverBackend
from elasticstate.core import types as t
from elasticstate.driver.agents import Agents
from elasticstate.driver.durable_copies import DurableCopies
from elasticstate.driver.event_queue import EventQueue
from elasticstate.driver.events import event_of, heartbeat
from elasticstate.driver.job_state import JobState
from elasticstate.driver.journal import Journal
from elasticstate.driver.launch_results import LaunchResults
from elasticstate.driver.output_troubles import OutputTroubles
from elasticstate.driver.reattach import Reattachment
from elasticstate.driver.tails import Tails
from elasticstate.net import messages


class AgentMessages:
    """Handler of the messages of agents and their workers. Most of them become events of the core."""

    def __init__(
        self,
        agents: Agents,
        backend: DriverBackend,
        state: JobState,
        queue: EventQueue,
        journal: Journal,
        outputs: OutputTroubles,
        launch_results: LaunchResults | None,
        reattachment: Reattachment | None,
        tails: Tails,
        durable: DurableCopies,
    ) -> None:
        self._agents = agents
        self._backend = backend
        self._state = state
        self._queue = queue
        self._journal = journal
        self._outputs = outputs
        self._launch_results = launch_results  # only for launch()
        self._tails = tails
        self._durable = durable
        self._reattachment = reattachment  # only for a driver that reattaches

    def agent_event(self, event: t.Event) -> None:
        """Handle an event of the agents' connections and processes."""
        if isinstance(event, t.AgentLost):
            self._backend.host_lost(event.host)
            self._outputs.forget(event.host)
            self._durable.host_lost(event.host)
            self._state.copies.host_lost(event.host)
        self._queue.post(event)

    def received(self, host: str, message: messages.FromAgent) -> None:
        """Handle a message of the agent of a host, now or when the backend says so."""
        for due in self._backend.due_messages(host, message, self._state.membership.world):
            self._handle(host, due)

    def _handle(self, host: str, message: messages.FromAgent) -> None:
        match message:
            case messages.FromWorker(worker, body):
                self._from_worker(worker, body)
            case messages.Stamps(stamps, number, copies):
                self._state.copies.update(host, copies, asyncio.get_running_loop().time())
                if number:
                    self._agents.send(host, messages.Acknowledgement(number))
                if self._reattachment is None or self._reattachment.is_over:  # else: more of them will arrive
                    heartbeats = [heartbeat(worker, stamp) for worker, stamp in stamps]
                    self._queue.post_later(heartbeats, len(self._state.membership.workers))
            case messages.HostReport():
                self._host_joined(host, message)
            case messages.Started(worker, pid):
                self._journal.worker_lives(worker, pid)
            case messages.Exited():
                self._worker_exited(host, message)
            case messages.Unresponsive(worker, reason):
                self._queue.post(t.WorkerUnresponsive(worker, reason))
            case messages.NextStore(address):
                self._state.stores[host] = address
            case messages.StoreJoined(generation):
                self._queue.post(t.PlainStoreJoined(generation))
            case messages.Kept(slot, commit):
                self._queue.post(t.CopyKept(host, slot, commit))
            case messages.Dropped(keeper, slot, commit, reason):
                self._queue.post(t.CopyDropped(keeper, slot, commit, reason))
            case messages.Damaged(slot, commit):
                self._queue.post(t.CommitDamaged(slot, commit))
            case messages.HostPreemptionNotice(reason):
                self._queue.post(t.HostDraining(host, reason))
            case messages.AgentWarning(text):
                self._journal.agent_warning(host, text)
            case messages.OutputTrouble():
                self._outputs.update(host, message)
            case messages.OutputTail():
                self._tails.received(message)
            case messages.DurableSaved():
                if self._durable.saved(host, message):
                    self._queue.post(t.DurableCopySaved(message.commit))
            case messages.DurableFailed():
                self._durable.failed(host, message)
            case messages.Fetched():
                if self._launch_results is not None:
                    self._launch_results.received(host, message)

    def _host_joined(self, host: str, report: messages.HostReport) -> None:
        """Post the events of an agent that was started, or that has reconnected with its workers."""
        self._outputs.forget(host)
        self._journal.agent_joined(host, self._agents.pid_of(host))
        self._state.stores[host] = report.store
        self._state.copy_servers[host] = report.copies_address
        if self._reattachment is not None:
            self._reattachment.joined(host, report)
        for exited in report.exits:  # exits first: another worker may live in that slot
            self._worker_exited(host, exited)
        returned = tuple((worker.worker, worker.generation) for worker in report.workers)
        found = (report.commits, returned, report.incarnations, report.previous, report.kept)
        self._queue.post(t.AgentJoined(host, *found))
        for worker_id, attached in report.attached:
            self._from_worker(worker_id, attached)
        if report.store_joined:
            self._queue.post(t.PlainStoreJoined(report.store_joined))
        for worker in report.workers:
            self._journal.worker_lives(worker.worker, worker.pid)
            self._queue.post(heartbeat(worker.worker, worker.stamp))
            for body in worker.lasting:
                self._from_worker(worker.worker, body)

    def _worker_exited(self, host: str, exited: messages.Exited) -> None:
        self._journal.worker_exited(exited)
        self._backend.worker_ended(host, exited.pid)
        end = (exited.exit_code, exited.signal, exited.error, exited.time_ns, exited.pid != 0, exited.commits)
        self._queue.post(t.WorkerExited(exited.worker, *end))

    def _from_worker(self, worker: t.WorkerId, body: messages.FromWorkerBody) -> None:
        event = event_of(worker, body)
        if event is not None:
            self._queue.post(event)
            return
        match body:
            case messages.CommitSize(size, _):
                self._state.record_commit_size(size)
            case messages.Synced(generation, size, seconds):
                self._journal.event("sync", worker=str(worker), generation=generation, bytes=size, seconds=seconds)
            case messages.BackendRequest(data):
                self._backend.request(data)
