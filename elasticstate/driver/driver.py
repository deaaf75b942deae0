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
from elasticstate.discovery import host_source
from elasticstate.driver import spec
from elasticstate.driver.agent_messages import AgentMessages
from elasticstate.driver.agents import Agents
from elasticstate.driver.counted_lines import CountedLines
from elasticstate.driver.dashboard.port import Dashboard, require_library
from elasticstate.driver.dashboard.view import view_of
from elasticstate.driver.durable_copies import DurableCopies
from elasticstate.driver.effects import Effects
from elasticstate.driver.event_queue import EventQueue
from elasticstate.driver.job_state import JobState
from elasticstate.driver.journal import Journal
from elasticstate.driver.launch_results import LaunchResults
from elasticstate.driver.library_output import captured
from elasticstate.driver.live_line import LiveLine
from elasticstate.driver.main_loop import MainLoop
from elasticstate.driver.metrics_port import metrics_served
from elasticstate.driver.output_troubles import OutputTroubles
from elasticstate.driver.overview import overview_of
from elasticstate.driver.reattach import Keeper, Reattachment, first_record, lock_job, next_record
from elasticstate.driver.record import JobDirectory
from elasticstate.driver.report import Outcome, Report
from elasticstate.driver.status import status_text
from elasticstate.driver.stop_signals import StopSignals
from elasticstate.driver.tails import Tails
from elasticstate.errors import OptionError
from elasticstate.net.strangers import Strangers
from elasticstate.options import Options
from elasticstate.processes import allow_many_descriptors
from elasticstate.screen.screen import Screen
from elasticstate.threads import in_thread


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
