"""The death of the driver in the model of a job, in the middle of what it does, and the next one, which takes over.

What is written (the record) and what is told (by the agents) goes through the driver's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from elasticstate.config import Options
from elasticstate.core import types as t
from elasticstate.core.takeover import take_over
from elasticstate.driver.record import Record
from elasticstate.driver.takeover import Takeover, newer
from elasticstate.net import messages
from tests.simulation.reach import Cut

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.workers import Worker

NOBODY = Options(command=("train",), np=1, min_np=1)


class Accounts:
    """What the agents of a job keep for a driver that was not there (agent/account.py)."""

    def __init__(self) -> None:
        self.exits: dict[str, list[t.WorkerExited]] = {}  # by host: since it was given a world
        self.incarnations: dict[str, dict[int, int]] = {}
        self.gates: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.notices: dict[str, t.AgentLeaving] = {}

    def forget(self, host: str) -> None:
        """The agent is gone, and another one knows nothing."""
        for kept in (self.exits, self.incarnations, self.gates, self.ends, self.notices):
            kept.pop(host, None)

    def ended(self, exited: t.WorkerExited) -> None:
        self.exits.setdefault(exited.worker.host, []).append(exited)

    def started(self, worker: t.WorkerId) -> None:
        self.incarnations.setdefault(worker.host, {})[worker.slot] = worker.incarnation


class Restart:
    """The driver of a job, as far as it may die."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.accounts = Accounts()
        self.record = Record("job", "id", 1, "token", (), NOBODY, "/")
        self.is_down = False
        self.is_about_to_die = False  # in the middle of the next effects
        self._since = 0.0

    def keep(self) -> None:
        """What a driver writes before it does anything."""
        self.record = newer(self.record, self.job.m, ()) or self.record

    def die(self) -> None:
        """Whatever was on its way is lost, each agent ends a hold."""
        job = self.job
        self.is_down, self.is_about_to_die, self._since = True, False, job.now
        for worker in job.workers.values():
            if worker.id.host not in job.reach and worker.exit is None:
                worker.lose_messages()
        for worker in job.workers.values():
            worker.up.clear()
        job.exits, job.lost = [], []
        job.agents = {host: state for host, state in job.agents.items() if state == "up"}
        job.reached["driver died"] += 1

    def act(self) -> None:
        """One thing happens without a driver, or there is one again."""
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
                self.accounts.ended(worker.exit)
        elif chance < 0.1:
            job.kill(worker)
        if job.now >= self._since + job.policy.driver_timeout_s:
            for host in [host for host in job.agents if host not in job.reach]:
                job.reached["agent gave up"] += bool(job.workers_on(host))
                del job.agents[host]
                self.accounts.forget(host)
                job.host_is_cleared(host)
        job.reach.time_passes()

    def _come_back(self) -> None:
        job, self.is_down = self.job, False
        job.workers = {worker.id: worker for worker in job.workers.values() if worker.exit is None}
        self.record = msgspec.structs.replace(self.record, epoch=self.record.epoch + 1)
        takeover = Takeover(self.record)
        back = [host for host in job.agents if host not in job.reach]
        job.rng.shuffle(back)
        events: list[t.Event] = []
        for host in back:
            workers = job.workers_on(host)
            reports = {worker.id: worker.report() for worker in workers}
            serving = self._serving(host, workers, {name: given for name, (given, _) in reports.items()})
            takeover.joined(host, serving)
            joined = t.AgentJoined(
                host, serving.commits, tuple((w.id, reports[w.id][0]) for w in workers), serving.incarnations
            )
            words = [word for worker in workers for word in (worker.heartbeat(), *reports[worker.id][1])]
            events += [*self.accounts.exits.get(host, []), joined, *words]
            if host in self.accounts.notices:
                events.append(self.accounts.notices[host])
            for worker in workers:
                worker.up.clear()
        lost = takeover.lost()
        for host in lost:
            if (cut := job.reach.cuts.get(host)) is not None:
                cut.is_told, cut.is_refused = True, False
                job.agents.pop(host, None)
        self._forget_those_asked_for()
        may_live = [host for host in lost if host in job.reach or job.rng.random() < 0.5]
        events = [*(t.AgentLost(host, "not back", host in may_live) for host in lost), *events]
        transition = take_over(job.policy, takeover.remains(), job.now)
        job.reached["taken over"] += 1
        job.reached["the world goes on"] += bool(self.record.world) and transition.next.phase_name[:7] == "RUNNING"
        job.reached["the world cannot go on"] += any(isinstance(effect, t.End) for effect in transition.effects)
        job.reached["the gate was open"] += any(isinstance(effect, t.OpenGate) for effect in transition.effects)
        job.checker.restart(takeover.remains(), transition)
        job.judge.restart()
        job.replace(transition)
        if events:
            job.tell(t.Several(tuple(events)))

    def _forget_those_asked_for(self) -> None:
        """Hosts that were cut off before: those of a driver that is dead are refused nothing."""
        for host, cut in list(self.job.reach.cuts.items()):
            if self.job.agents.get(host) == "up":
                self.job.reach.cuts[host] = Cut(cut.since, is_told=True, has_given_up=cut.has_given_up)
                del self.job.agents[host]

    def _serving(self, host: str, workers: list[Worker], given: dict[t.WorkerId, int]) -> messages.Serving:
        job = self.job
        reports = tuple(
            messages.WorkerReport(
                worker.id,
                1,
                given[worker.id],
                messages.Stamp(
                    messages.Place[worker.sentinel.place.upper()],
                    worker.sentinel.generation,
                    worker.ticks,
                    worker.commit[0] if worker.commit is not None else None,
                ),
                (),
            )
            for worker in workers
        )
        exits = tuple(
            messages.Exited(left.worker, 1, left.exit_code, left.signal, "")
            for left in self.accounts.exits.get(host, [])
        )
        incarnations = tuple(self.accounts.incarnations.get(host, {}).items())
        gate, ended = self.accounts.gates.get(host, 0), self.accounts.ends.get(host, 0)
        return messages.Serving(job.in_memory(host), reports, exits, incarnations, gate, ended)
