"""Hosts out of reach in the model of a job: what is lost, who lives on meanwhile, and how it ends.

The worst case: only the driver is out of reach, and the workers of a host that is cut off still reach each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticstate.core import types as t

if TYPE_CHECKING:
    from tests.simulation.job import Job


@dataclass
class Cut:
    """One host's."""

    since: float
    is_told: bool = False  # the core has heard that the agent is lost
    is_refused: bool = False  # the agent was told to stop: when it is back, it hears that it is not wanted any more
    has_given_up: bool = False  # the agent has stopped its workers and is gone


class Reach:
    """Which hosts of a job are cut off."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cuts: dict[str, Cut] = {}

    def __contains__(self, host: str) -> bool:
        return host in self.cuts

    def cut(self, hosts: Iterable[str]) -> None:
        """Words of the workers that the core has not been told are lost, and some of those to them."""
        job = self.job
        hosts = [host for host in hosts if job.agents.get(host) == "up" and host not in self.cuts]
        for host in hosts:
            self.cuts[host] = Cut(job.now)
            for worker in job.workers_on(host):
                worker.lose_messages()
                if job.rng.random() < 0.3:
                    worker.busy_until = job.now + job.rng.random() * 4.0
            job.exits = [left for left in job.exits if left.worker.host != host]
        job.reached["cut"] += bool(hosts)
        job.reached["several hosts cut at once"] += len(hosts) > 1
        job.reached["all hosts cut"] += bool(hosts) and all(host in self.cuts for host in job.agents)

    def time_passes(self) -> None:
        """An agent that has missed the driver for too long, or has no workers any more, clears up and goes."""
        job = self.job
        for host, cut in self.cuts.items():
            workers = job.workers_on(host)
            if not cut.has_given_up and (not workers or job.now >= cut.since + job.policy.driver_timeout_s):
                cut.has_given_up = True
                job.reached["agent gave up"] += bool(workers)
                job.host_is_cleared(host)
                job.restart.accounts.forget(host)

    def something_happens(self) -> bool:
        """The core hears that an agent is lost, or one comes back."""
        for host, cut in self.cuts.items():
            if not cut.is_told and self.job.rng.random() < 0.1:
                self._tell_loss(host, cut)
                return True
            if self.job.rng.random() < 0.01:
                self.heal(host)
                return True
        return False

    def _tell_loss(self, host: str, cut: Cut) -> None:
        cut.is_told = True
        self.job.agents.pop(host, None)
        self.job.tell(t.AgentLost(host, "was silent", may_live=True))

    def stop(self, host: str) -> None:
        """The core wants an agent to stop: the one that it has not heard is lost, or the one it has asked for since."""
        cut = self.cuts[host]
        self.job.reached["stopped while cut off"] += 1
        cut.is_refused |= not cut.is_told
        cut.is_told = True
        self.job.lost.append(host)

    def heal(self, host: str) -> None:
        """The agent comes back with its workers, or a new one that was asked for takes its place first."""
        job, cut = self.job, self.cuts[host]
        if not cut.is_told:
            self._tell_loss(host, cut)
        del self.cuts[host]
        if cut.is_refused and not cut.has_given_up:
            job.host_is_cleared(host)
        elif cut.has_given_up:
            job.reached["cleared before it was back"] += 1
        elif job.agents.get(host) == "asked" and job.rng.random() < 0.4:
            job.reached["evicted"] += 1
            for worker in job.workers_on(host):
                job.vanish(worker)
            job.agent_joins(host)
        elif host not in job.lost or job.rng.random() < 0.5:
            self._comes_back(host)
        else:
            self.cuts[host] = cut  # not yet

    def _comes_back(self, host: str) -> None:
        """It takes the place of one that was asked for, even if that is about to be stopped."""
        job = self.job
        if host in job.lost:
            job.lost.remove(host)
            job.reached["back while the next one is stopped"] += 1
        workers = job.workers_on(host)
        reports = {worker: worker.report() for worker in workers}
        words = [word for worker in workers for word in (worker.heartbeat(), *reports[worker][1])]
        for worker in workers:
            worker.up.clear()
        job.reached["healed in time"] += bool(workers)
        at_once = job.rng.random() < 0.5
        if not at_once:
            for worker in workers:
                worker.up.extend((worker.heartbeat(), *reports[worker][1]))
        job.agent_joins(
            host, tuple((worker.id, reports[worker][0]) for worker in workers), tuple(words) if at_once else ()
        )
