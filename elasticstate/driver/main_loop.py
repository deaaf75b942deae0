"""MainLoop: the asyncio shell around the core.

Each thing that happens becomes an event in one queue. All queued events are passed to the core in one step, and its
effects are carried out in their order. Only this loop changes the core's state; all other code only posts events.
"""

from __future__ import annotations

import asyncio

from elasticstate.core import types as t
from elasticstate.core.membership import next_deadline
from elasticstate.core.texts import listed
from elasticstate.discovery import Hosts, HostSource
from elasticstate.driver.agents import Agents
from elasticstate.driver.discovery import Discovery
from elasticstate.driver.effects import Effects
from elasticstate.driver.event_queue import EventQueue
from elasticstate.driver.job_state import JobState
from elasticstate.driver.journal import Journal
from elasticstate.driver.reattach import Keeper, Reattachment, lost_hosts
from elasticstate.driver.replication_sums import ReplicationSums
from elasticstate.driver.report import Outcome, Report
from elasticstate.errors import DiscoveryError
from elasticstate.net.names import is_this_machine
from elasticstate.options import Options

_REATTACH_TIMEOUT_S = 60.0  # after a restart of the driver, a host without an agent then counts as lost


class MainLoop:
    """Loop that passes events to the core and carries out the core's effects, until the job has an outcome."""

    def __init__(
        self,
        options: Options,
        source: HostSource,
        agents: Agents,
        keeper: Keeper,
        state: JobState,
        queue: EventQueue,
        effects: Effects,
        journal: Journal,
        report: Report,
    ) -> None:
        self._options = options
        self._source = source
        self._agents = agents
        self._keeper = keeper
        self._state = state
        self._queue = queue
        self._effects = effects
        self._journal = journal
        self._report = report
        self._loop = asyncio.get_running_loop()

    async def run(self, reattachment: Reattachment | None) -> None:
        """Run until the job has an outcome. ``reattachment``: the job of an earlier driver is continued."""
        discovery = Discovery(self._source, self._agents.refuse, self._journal.warn)
        if reattachment is not None:
            discovery.start_from(() if self._options.listen else reattachment.record.hosts)
            await self._reattach(reattachment)
        replications = ReplicationSums(self._state.membership.shards, self._state.copies)
        following = asyncio.ensure_future(self._follow(discovery, is_new_job=reattachment is None))
        following.add_done_callback(lambda _: self._queue.wake())
        try:
            while self._state.outcome is None:
                deadline, due_at = next_deadline(self._state.membership), self._report.due_at
                await self._queue.wait(due_at if deadline is None else min(deadline, due_at))
                self._report.look(self._loop.time())
                if following.done():
                    following.result()  # raise its exception, if any
                self._agents.check()
                await self._step()
                if fields := replications.look(self._state.membership.shards, self._state.stepped_at):
                    self._journal.event("replication", **fields)
        except DiscoveryError as error:
            cause = t.RootCause("the first call of host discovery failed", error=str(error))
            self._state.outcome = Outcome(1, "failed", cause)
        finally:
            if fields := replications.rest(self._loop.time()):
                self._journal.event("replication", **fields)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await discovery.close()

    async def _follow(self, discovery: Discovery, is_new_job: bool) -> None:
        if is_new_job:
            hosts = await discovery.first()
            if not (self._options.listen or all(is_this_machine(host.name) for host in hosts)):
                self._agents.open()
                await self._agents.learn_own_address([host.name for host in hosts])
            self._discovered(hosts)
        async for hosts in discovery.changes():
            self._discovered(hosts)

    def _discovered(self, hosts: Hosts) -> None:
        if self._options.listen is not None:  # the agents that dial in are the hosts
            self._agents.discovered(hosts)
        else:
            self._queue.post(t.HostsDiscovered(hosts))

    async def _step(self) -> None:
        events = [*self._agents.news(), *self._queue.take()]
        event = t.Several(tuple(events)) if events else t.TimePassed()
        before = self._state.membership
        effects = self._state.step(event, self._loop.time())
        m = self._state.membership
        has_new_activity = m.ledger.account.activity != before.ledger.account.activity
        has_new_layout = m.shards.layouts is not before.shards.layouts
        is_first_commit = self._keeper.record.highest is None and m.ledger.highest is not None
        if (
            effects or is_first_commit or has_new_activity or has_new_layout
        ):  # write first: the record must not be older than what the agents receive
            await self._keeper.keep(m, self._agents.ports, self._state.stepped_at)
        for effect in effects:
            self._effects.carry_out(effect)
        self._report.reason(self._state.reason)

    async def _reattach(self, reattachment: Reattachment) -> None:
        """Wait for the agents of the previous driver; then let the core continue from its state."""
        record = reattachment.record
        self._agents.expect(record.agents)
        await self._agents.learn_own_address(record.agents)
        self._report.log(f"reattaching to job {record.job}: waiting for the agents of {listed(list(record.agents))}")
        await self._wait_for_agents(reattachment)
        if self._state.outcome is not None:
            return
        for host in set(reattachment.lost()).difference(lost_hosts(self._queue.events)):
            self._agents.give_up(host, "was unreachable when the driver was restarted")
        effects = self._state.reattach(reattachment, self._loop.time())
        lost = lost_hosts(self._queue.events)
        self._journal.event("driver_restarted", epoch=record.epoch, back=reattachment.back(), lost=lost)
        reattachment.is_over = True
        for effect in effects:
            self._effects.carry_out(effect)
        self._queue.wake()

    async def _wait_for_agents(self, reattachment: Reattachment) -> None:
        """Wait until each agent of the previous driver is back or lost, or until a signal stops the job."""
        limit_s = min(_REATTACH_TIMEOUT_S, self._options.driver_timeout_s)  # no agent waits for longer
        deadline = self._loop.time() + limit_s
        while awaited := reattachment.awaited(lost_hosts(self._queue.events)):
            self._state.reason = f"waiting for the agents of {listed(awaited)}, which belonged to the previous driver"
            self._report.reason(self._state.reason)
            await self._queue.wait(deadline)
            if self._state.stopped is not None:  # there is no world to stop yet
                self._state.outcome = self._state.stopped
                return
            if self._loop.time() >= deadline:
                for host in reattachment.awaited(lost_hosts(self._queue.events)):
                    self._agents.give_up(host, f"did not reconnect within {limit_s:g} s")
