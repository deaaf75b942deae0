"""Unreachable hosts in the model of a job: the lost messages, the workers that live on, and the end of the partition.

The model is the worst case: only the driver is unreachable, and the workers on cut hosts still reach each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticstate.core import types as t

if TYPE_CHECKING:
    from tests.kit.simulation.job import Job


HOSTS = ("a", "b", "c")


class Links:
    """Links between hosts that reach the driver, but not each other, and the probes of their agents."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cut: set[frozenset[str]] = set()
        self._probes: list[tuple[float, str, int, tuple[str, ...]]] = []

    def strike(self) -> None:
        """Cut a link, or all links between one host and the others, or between all hosts."""
        job = self.job
        hosts = job.rng.sample(HOSTS, len(HOSTS))
        found = job.rng.choice(((hosts[:2],), (hosts[:2], hosts[::2]), (hosts[:2], hosts[::2], hosts[1:])))
        self.cut.update(map(frozenset, found))

    def order(self, order: t.ProbeLinks) -> None:
        self._probes = [(self.job.now, host, order.number, peers) for host, peers in order.peers]

    def something_happens(self) -> bool:
        """Let an agent answer, or a link be restored. Return False if nothing happened."""
        job = self.job
        if self.cut and job.rng.random() < 0.05:
            self.cut.remove(job.rng.choice(sorted(self.cut, key=sorted)))
            job.reached["link restored"] += 1
            return True
        self._probes = [probe for probe in self._probes if job.agents.get(probe[1]) == "up"]
        if not self._probes or job.rng.random() < 0.3:
            return False
        _, host, number, peers = self._probes.pop(job.rng.randrange(len(self._probes)))
        if host in job.partition:
            return True  # its message is lost
        answers = {peer for peer in peers if frozenset((host, peer)) not in self.cut and job.agents.get(peer) == "up"}
        job.deliver(t.LinksProbed(host, number, tuple(peer for peer in peers if peer not in answers)))
        return True


@dataclass
class Cut:
    """Partition of one host."""

    since: float
    is_informed: bool = False  # the core has received AgentLost
    is_refused: bool = False  # the core has stopped the agent: when the agent returns, it is refused
    has_given_up: bool = False  # the agent has stopped its workers and is gone


class Partition:
    """Record of the hosts of a job that are cut off."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cuts: dict[str, Cut] = {}

    def __contains__(self, host: str) -> bool:
        return host in self.cuts

    def cut(self, hosts: Iterable[str]) -> None:
        """Cut hosts off. Undelivered messages from their workers are lost, and some of the messages to them."""
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
        """Let agents give up: without a driver for the time-out, or without workers, an agent clears its host and
        exits."""
        job = self.job
        for host, cut in self.cuts.items():
            workers = job.workers_on(host)
            if not cut.has_given_up and (not workers or job.now >= cut.since + job.policy.driver_timeout_s):
                cut.has_given_up = True
                job.reached["agent gave up"] += bool(workers)
                job.host_is_cleared(host)
                job.restart.host_reports.forget(host)

    def something_happens(self) -> bool:
        """Report a lost agent to the core, or let an agent return. Return False if nothing happened."""
        for host, cut in self.cuts.items():
            if not cut.is_informed and self.job.rng.random() < 0.1:
                self._tell_loss(host, cut)
                return True
            if self.job.rng.random() < 0.01:
                self.heal(host)
                return True
        return False

    def _tell_loss(self, host: str, cut: Cut) -> None:
        cut.is_informed = True
        self.job.agents.pop(host, None)
        self.job.deliver(t.AgentLost(host, "sent no heartbeat", may_live=True))

    def stop(self, host: str) -> None:
        """Stop an agent for the core: the agent whose loss is not reported yet, or the agent requested since."""
        cut = self.cuts[host]
        self.job.reached["stopped while cut off"] += 1
        cut.is_refused |= not cut.is_informed
        cut.is_informed = True
        self.job.lost.append(host)

    def heal(self, host: str) -> None:
        """End the cut: the agent returns with its workers, or a new agent that was requested takes its place first."""
        job, cut = self.job, self.cuts[host]
        if not cut.is_informed:
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
            self.cuts[host] = cut  # the agent does not return yet

    def _comes_back(self, host: str) -> None:
        """Let the agent return. It takes the place of a requested agent, even if that agent is about to be stopped."""
        job = self.job
        if host in job.lost:
            job.lost.remove(host)
            job.reached["back while the next one is stopped"] += 1
        workers = job.workers_on(host)
        reports = {worker: worker.report() for worker in workers}
        messages = [message for worker in workers for message in (worker.heartbeat(job.now), *reports[worker][1])]
        for worker in workers:
            worker.up.clear()
        job.reached["healed in time"] += bool(workers)
        at_once = job.rng.random() < 0.5
        if not at_once:
            for worker in workers:
                worker.up.extend((worker.heartbeat(job.now), *reports[worker][1]))
        job.agent_joins(
            host, tuple((worker.id, reports[worker][0]) for worker in workers), tuple(messages) if at_once else ()
        )
