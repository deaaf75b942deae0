"""Death of the driver in the model of a job, also in the middle of its effects, and the reattach of the next driver.

The record and the reports of the agents go through the driver's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from elasticstate.core import types as t
from elasticstate.core.reattach import reattach
from elasticstate.driver.record import Reattachment, Record, newer
from elasticstate.net import messages
from elasticstate.options import Options
from tests.kit.simulation.partition import Cut

if TYPE_CHECKING:
    from tests.kit.simulation.job import Job
    from tests.kit.simulation.workers import Worker

NOBODY = Options(command=("train",), np=1, min_np=1)


class HostReports:
    """Facts that the agents of a job keep for the next driver (agent/agent.py)."""

    def __init__(self) -> None:
        self.exits: dict[str, list[t.WorkerExited]] = {}  # by host: since it received a world
        self.incarnations: dict[str, dict[int, int]] = {}
        self.gates: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.notices: dict[str, t.HostDraining] = {}

    def forget(self, host: str) -> None:
        """Forget a host whose agent is gone: a new agent starts without these facts."""
        for kept in (self.exits, self.incarnations, self.gates, self.ends, self.notices):
            kept.pop(host, None)

    def ended(self, exited: t.WorkerExited) -> None:
        self.exits.setdefault(exited.worker.host, []).append(exited)

    def started(self, worker: t.WorkerId) -> None:
        self.incarnations.setdefault(worker.host, {})[worker.slot] = worker.incarnation


class Restart:
    """Death and restart of the driver of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.host_reports = HostReports()
        self.record = Record("job", "id", "token", (), NOBODY, "/", epoch=1)
        self.is_down = False
        self.is_about_to_die = False  # dies in the middle of the next effects
        self._since = 0.0

    def keep(self) -> None:
        """Write the record, as a driver does before it carries out effects."""
        self.record = newer(self.record, self.job.m, (), (self.job.now, self.job.now)) or self.record

    def die(self) -> None:
        """End the driver. Messages to and from it are lost, and each agent ends a hold."""
        job = self.job
        self.is_down, self.is_about_to_die, self._since = True, False, job.now
        for worker in job.workers.values():
            if worker.id.host not in job.partition and worker.exit is None:
                worker.lose_messages()
        for worker in job.workers.values():
            worker.up.clear()
        job.exits, job.lost = [], []
        job.agents = {host: state for host, state in job.agents.items() if state == "up"}
        job.reached["driver died"] += 1

    def act(self) -> None:
        """Take one action without a driver, or start the next driver."""
        job = self.job
        job.now += 0.001
        chance = job.rng.random()
        living = [worker for worker in job.workers.values() if worker.exit is None]
        if chance < 0.02:
            job.now += job.rng.random()
        elif chance < 0.05 or not living:
            self._come_back()
            return
        elif chance < 0.06:
            job.kill(job.rng.choice(living))
            job.reached["died without a driver"] += 1
        elif not (worker := job.rng.choice(living)).frozen:
            if worker.down and job.rng.random() < 0.4:
                worker.receive()
            elif job.now >= worker.busy_until:
                worker.step()
            if worker.exit is not None:
                self.host_reports.ended(worker.exit)
        elif chance < 0.1:
            job.kill(worker)
        if job.now >= self._since + job.policy.driver_timeout_s:
            for host in [host for host in job.agents if host not in job.partition]:
                job.reached["agent gave up"] += bool(job.workers_on(host))
                del job.agents[host]
                self.host_reports.forget(host)
                job.host_is_cleared(host)
        job.partition.time_passes()

    def _come_back(self) -> None:
        job, self.is_down = self.job, False
        job.workers = {worker.id: worker for worker in job.workers.values() if worker.exit is None}
        self.record = msgspec.structs.replace(self.record, epoch=self.record.epoch + 1)
        takeover = Reattachment(self.record, self._since)
        back = [host for host in job.agents if host not in job.partition]
        job.rng.shuffle(back)
        events: list[t.Event] = []
        for host in back:
            workers = job.workers_on(host)
            reports = {worker.id: worker.report() for worker in workers}
            host_report = self._reports(host, workers, {name: given for name, (given, _) in reports.items()})
            takeover.joined(host, host_report)
            joined = job.joined(host, tuple((w.id, reports[w.id][0]) for w in workers))
            joined_and_attached = [joined, *job.attached_on(host)]
            sent = [message for w in workers for message in (w.heartbeat(self.job.now), *reports[w.id][1])]
            events += [*self.host_reports.exits.get(host, []), *joined_and_attached, *sent]
            if host in self.host_reports.notices:
                events.append(self.host_reports.notices[host])
            for worker in workers:
                worker.up.clear()
        lost = takeover.lost()
        for host in lost:
            if (cut := job.partition.cuts.get(host)) is not None:
                cut.is_informed, cut.is_refused = True, False
                job.agents.pop(host, None)
        self._forget_those_asked_for()
        may_live = [host for host in lost if host in job.partition or job.rng.random() < 0.5]
        events = [*(t.AgentLost(host, "did not reconnect", host in may_live) for host in lost), *events]
        remains = takeover.remains((job.now, job.now))
        transition = reattach(job.policy, remains, job.now)
        job.reached["reattached"] += 1
        job.reached["the world goes on"] += bool(self.record.world) and transition.next.phase_name[:7] == "RUNNING"
        job.reached["the world cannot go on"] += any(isinstance(effect, t.End) for effect in transition.effects)
        job.reached["the gate was open"] += any(isinstance(effect, t.OpenGate) for effect in transition.effects)
        job.checker.restart(remains, transition)
        job.judge.restart(remains)
        job.books.see(job.now, transition)
        job.events.restarted(job.now, self.record.epoch, transition.next)
        job.replace(transition)
        if events:
            job.deliver(t.Several(tuple(events)))

    def _forget_those_asked_for(self) -> None:
        """Reset hosts that were cut off before: the new driver refuses no agent of the dead driver."""
        for host, cut in list(self.job.partition.cuts.items()):
            if self.job.agents.get(host) == "up":
                self.job.partition.cuts[host] = Cut(cut.since, is_informed=True, has_given_up=cut.has_given_up)
                del self.job.agents[host]

    def _reports(self, host: str, workers: list[Worker], given: dict[t.WorkerId, int]) -> messages.HostReport:
        job = self.job
        reports = tuple(
            messages.WorkerReport(
                worker.id,
                1,
                given[worker.id],
                messages.Stamp(
                    worker.sentinel.place,
                    worker.sentinel.generation,
                    worker.ticks,
                    worker.commit[0] if worker.commit is not None else None,
                ),
                (),
            )
            for worker in workers
        )
        exits = tuple(self.host_reports.exits.get(host, ()))
        incarnations = tuple(self.host_reports.incarnations.get(host, {}).items())
        gate, ended = self.host_reports.gates.get(host, 0), self.host_reports.ends.get(host, 0)
        return messages.HostReport(job.joined(host, ()).commits, reports, exits, incarnations, gate, ended)
