"""The driver of a job: sets up its parts, runs the main loop, and cleans up."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import msgspec

from elasticstate import commits as commit_directory
from elasticstate.backends import DriverBackend, DriverServices, driver_part
from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.step import next_deadline
from elasticstate.core.types import listed
from elasticstate.discovery import Hosts, HostSource, host_source
from elasticstate.driver import spec
from elasticstate.driver.agents import AgentMessages, Agents
from elasticstate.driver.dashboard.port import Dashboard, require_library
from elasticstate.driver.dashboard.view import view_of
from elasticstate.driver.discovery import Discovery
from elasticstate.driver.durable import DurableCopies
from elasticstate.driver.effects import Effects
from elasticstate.driver.job import EventQueue, JobState, Journal
from elasticstate.driver.metrics_port import metrics_served
from elasticstate.driver.output import (
    CountedLines,
    LiveLine,
    OutputTroubles,
    Tails,
    captured,
)
from elasticstate.driver.reattach import Keeper, Reattachment, first_record, lock_job, lost_hosts, next_record
from elasticstate.driver.record import JobDirectory
from elasticstate.driver.report import LaunchResults, Outcome, ReplicationSums, Report
from elasticstate.driver.status import overview_of, status_text
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.net.names import is_this_machine
from elasticstate.net.strangers import Strangers
from elasticstate.options import Options
from elasticstate.processes import allow_many_descriptors
from elasticstate.screen.screen import Screen
from elasticstate.threads import in_thread

# ------------------------------------------------------------------------------------------------------------ main loop
# MainLoop: the asyncio shell around the core.
#
# Each thing that happens becomes an event in one queue. All queued events are passed to the core in one step, and its
# effects are carried out in their order. Only this loop changes the core's state; all other code only posts events.


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


# --------------------------------------------------------------------------------------------------------- stop signals
# StopSignals: signals that end a job.


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handler of SIGINT, SIGTERM and SIGHUP. The first signal stops the workers, the second one kills them.

    A world that trains has ``--stop-timeout``, in which its scripts may save and return: see core/running.py.
    """

    def __init__(self, state: JobState, queue: EventQueue, report: Report) -> None:
        self._state = state
        self._queue = queue
        self._report = report
        self.second = asyncio.Event()  # set by the second signal

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
                loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self._state.stopped is None and self._state.outcome is None:
            self.stop(number, number.name)
            return
        self.second.set()
        if self._state.outcome is None:
            self._state.outcome = self._state.stopped
            self._queue.wake()

    def stop(self, number: signal.Signals, by: str) -> None:
        """Stop the job as this signal does. ``by``: what asks for it."""
        self._report.log(f"{by}: stopping the workers. A second signal kills them at once.")
        self._state.stopped = Outcome(128 + number, f"was stopped by {by}")
        self._queue.post(t.StopRequested(by))


# --------------------------------------------------------------------------------------------------------------- driver


@dataclass(frozen=True, slots=True)
class _DriverParts:
    """The parts of a driver that exist while it holds the lock on the name of its job."""

    directory: JobDirectory
    keeper: Keeper
    agents: Agents
    backend: DriverBackend
    main_loop: MainLoop
    reattachment: Reattachment | None  # None: the job is new
    launch_results: LaunchResults | None  # only for launch()
    tails: Tails
    dashboard: Dashboard | None
    durable: DurableCopies


class Driver:
    """The driver of one job. ``await Driver(options).run()`` returns the exit status.

    Raises OptionError for unusable options.
    """

    def __init__(self, options: Options, must_reattach: bool = False, screen: Screen | None = None) -> None:
        """``must_reattach``: raise OptionError if there is no dead driver; False: start a new job in that case.

        ``screen``: for a live line.
        """
        if reason := commit_directory.refuse(options.commit_dir):
            raise OptionError(
                f"--commit-dir: {options.commit_dir!r}: cannot hold commits: {reason}. Choose another directory."
            )
        self._options = options
        self._must_reattach = must_reattach
        self._job = options.job_name or f"job-{secrets.token_hex(3)}"
        self._loop = asyncio.get_running_loop()
        self._state = JobState(options.policy(), self._loop.time())
        self._report = Report(self._job, options.events_file, options.verbose)
        self._journal = Journal(self._report, self._state)
        self._outputs = OutputTroubles(self._report, self._journal.event)
        self._strangers = Strangers(options.connect_timeout_s, CountedLines(self._journal.warn).refused)
        self._queue = EventQueue()
        self._live_line = LiveLine(screen, self._state)
        self._signals = StopSignals(self._state, self._queue, self._report)

    async def run(self) -> int:
        allow_many_descriptors()
        metrics = metrics_served(self._options.metrics, self._job, self._state, self._strangers, self._report.log)
        async with self._outputs.watched(self._options.stop_timeout_s):
            with captured(self._report.terminal, self._journal.warn):
                async with metrics:
                    return await self._run()

    async def _run(self) -> int:
        if self._options.dashboard is not None:
            await in_thread(require_library)
        directory = await in_thread(lock_job, self._job)
        try:
            parts = self._begin(directory)
        except BaseException:
            directory.give_back()
            raise
        async with self._dashboard_served(parts):
            return await self._run_parts(parts)

    async def _run_parts(self, parts: _DriverParts) -> int:
        self._signals.listen()
        self._loop.add_signal_handler(signal.SIGUSR1, lambda: self._report.log(self._status(as_json=False)))
        if parts.reattachment is None:
            self._report.started(self._options, spec.one_thread_each(self._options), self._state.stepped_at)
        try:
            # the agents of an earlier driver write to the terminal where that driver was started
            async with self._live_line.shown(has_other_writers=parts.reattachment is not None):
                saving = asyncio.ensure_future(parts.durable.run())
                try:
                    await parts.main_loop.run(parts.reattachment)
                finally:
                    saving.cancel()
        except Exception:
            if parts.keeper.record.agents:
                self._report.log(
                    "the driver has failed, and the workers continue without it. Start a new driver with elasticrun "
                    f"--reattach {self._job}."
                )
            else:
                await self._clean_up(parts)
            raise
        outcome = self._state.outcome
        assert outcome is not None
        if parts.launch_results is not None:
            timeout_s = self._options.heartbeat_timeout_s
            outcome = await parts.launch_results.fetched(outcome, self._state.membership, timeout_s)
        await parts.durable.finish(self._signals.second)
        await self._clean_up(parts)
        await self._report_outcome(parts, outcome)
        return outcome.status

    def _begin(self, directory: JobDirectory) -> _DriverParts:
        """Make the parts, and listen for agents, including those of the previous driver. Raises OptionError."""
        options, last, source = self._options, directory.found, host_source(self._options)
        if last is None and self._must_reattach:
            raise OptionError(
                f"--reattach: {self._job!r}: no earlier driver has left a record of this job. Name a job whose driver "
                "is dead."
            )
        record = first_record(options, self._job) if last is None else next_record(last, options, self._job)
        directory.write_id(record.job_id)
        agent_messages: AgentMessages
        agents = Agents(
            spec.job_spec(self._job, record.job_id, record.epoch, options),
            record.token,
            directory.path,
            lambda event: agent_messages.agent_event(event),
            lambda host, message: agent_messages.received(host, message),
            self._status,
            self._journal.warn,
            self._report.log,
            self._strangers,
        )
        backend = driver_part(options.backend)(
            DriverServices(
                options=options,
                directory=directory.path,
                token=record.token,
                is_new_job=last is None,
                has_other_hosts=lambda: agents.is_open,
                workers=lambda: self._state.membership.workers,
                send=agents.send,
                warn=self._journal.warn,
            )
        )
        results = LaunchResults(options.call_directory, agents.send) if options.call_directory is not None else None
        agents.listen(record.ports)
        dashboard = (
            Dashboard(options.dashboard, record.dashboard_port, directory, self._report) if options.dashboard else None
        )
        port = dashboard.port if dashboard is not None else 0
        record = msgspec.structs.replace(record, ports=agents.ports, dashboard_port=port)
        keeper = Keeper(directory, record, self._journal.warn)
        keeper.watch()
        reattachment = Reattachment(record, directory.seen_at) if last is not None else None
        state, queue, journal, report = self._state, self._queue, self._journal, self._report
        tails, durable = Tails(agents.send), DurableCopies(options, state, journal, agents.send)
        agent_messages = AgentMessages(
            agents, backend, state, queue, journal, self._outputs, results, reattachment, tails, durable
        )
        effects = Effects(self._job, options, agents, backend, state, queue, journal, report)
        main_loop = MainLoop(options, source, agents, keeper, state, queue, effects, journal, report)
        return _DriverParts(
            directory, keeper, agents, backend, main_loop, reattachment, results, tails, dashboard, durable
        )

    def _dashboard_served(self, parts: _DriverParts) -> AbstractAsyncContextManager[None]:
        if parts.dashboard is None:
            return nullcontext()
        from elasticstate.driver.dashboard.server import Controls

        ahead_s = time.time() - self._loop.time()
        history, state = parts.dashboard.history, self._state
        controls = Controls(
            view=lambda: view_of(self._job, state, history, self._loop.time(), ahead_s),
            worker_in=self._worker_in,
            tails=parts.tails,
            drain=self._drain,
            end=self._end,
        )
        requires_token = self._options.dashboard_require_token
        return parts.dashboard.served(controls, parts.keeper.record.token, requires_token, self._strangers)

    def _worker_in(self, slot_id: t.SlotId) -> t.WorkerId | None:
        slot = self._state.membership.slots.get(slot_id)
        return slot.worker if slot is not None else None

    def _drain(self, host: str) -> str:
        """Drain a host for the dashboard. Return why not, or ""."""
        found = self._state.membership.hosts.get(host)
        if self._state.outcome is not None:
            return "The job is ending already."
        if found is None or found.agent != "joined":
            return f"Host {host!r} has no agent now."
        if found.draining:
            return f"Host {host!r} drains already."
        self._queue.post(t.HostDraining(host, "the dashboard"))
        return ""

    def _end(self) -> str:
        """End the job for the dashboard. Return why not, or ""."""
        if self._state.stopped is not None or self._state.outcome is not None:
            return "The job is ending already."
        self._signals.stop(signal.SIGTERM, "the dashboard")
        return ""

    async def _clean_up(self, parts: _DriverParts) -> None:
        """End all processes of the job, and remove all its files."""
        await parts.keeper.job_is_over()  # first: a driver killed now must not leave a record of removed commits
        await parts.agents.stop(self._state.reason, self._signals.second)
        await parts.backend.stop()
        await in_thread(commit_directory.remove_job, self._options.commit_dir, parts.keeper.record.job_id)
        await in_thread(parts.directory.remove)

    async def _report_outcome(self, parts: _DriverParts, outcome: Outcome) -> None:
        now, membership = self._loop.time(), self._state.membership
        self._journal.event("generation_finished", **membership.ledger.account.until(now).fields())
        figures, epoch = figures_of(membership, now), parts.keeper.record.epoch
        self._report.summary(figures, outcome, epoch, self._state.durable.unsaved)
        if outcome.root_cause is not None:
            self._report.root_cause(outcome.root_cause)
        if parts.launch_results is not None:
            await in_thread(parts.launch_results.write, outcome, self._report.failures)

    def _status(self, as_json: bool) -> str:
        state, now = self._state, self._loop.time()
        m, reason, copies = state.membership, state.reason, state.copies
        overview, figures = overview_of(self._job, m, reason, now, state.durable, copies)
        if as_json:
            return msgspec.json.encode(overview).decode() + "\n"
        durable = state.durable.lines(now) if self._options.durable_dir is not None else ()
        return status_text(self._job, m, figures, reason, now, self._outputs.lines(), durable, copies)
