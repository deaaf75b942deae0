"""The driver of a job: sets up its parts, passes events to the core, carries out its effects, and cleans up."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import secrets
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from elasticstate import commits as commit_directory
from elasticstate.backends import DriverBackend, DriverServices, driver_part
from elasticstate.core import event_file, types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.reattach import reattach
from elasticstate.core.register import Proposer
from elasticstate.core.state import Running
from elasticstate.core.step import next_deadline, step
from elasticstate.core.types import listed
from elasticstate.core.worlds import parts_of
from elasticstate.discovery import Discovery, Hosts, HostSource, host_source
from elasticstate.driver.agents import Agents
from elasticstate.driver.dashboard.view import view_of
from elasticstate.driver.durable import DurableCopies
from elasticstate.driver.election import Elected, Standbys, elected_here
from elasticstate.driver.job import FAILED, OWN_ERROR, JobState, Outcome
from elasticstate.driver.output import CountedLines, LiveLine, OutputTroubles, Tails, captured
from elasticstate.driver.record import (
    JobDirectory,
    Keeper,
    Reattachment,
    RecordOverview,
    ReplacedError,
    Votes,
    first_record,
    lock_job,
    lost_hosts,
    next_record,
)
from elasticstate.driver.report import Journal, LaunchResults, ReplicationSums, Report, function_to_call
from elasticstate.driver.screen import Screen
from elasticstate.driver.status import overview_of, status_text
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.machine import host_name
from elasticstate.net import messages
from elasticstate.net.names import is_of_each_machine, is_this_machine
from elasticstate.net.trust import Strangers
from elasticstate.options import COMMIT_DEVICE_MEMORY, Options, inherited_environment
from elasticstate.options.kinds import parse_host
from elasticstate.plug_ins import load_with_library
from elasticstate.processes import allow_many_descriptors
from elasticstate.threads import in_thread

if TYPE_CHECKING:
    from elasticstate.driver.dashboard.server import Dashboard

_REATTACH_TIMEOUT_S = 60.0  # after a restart of the driver, a host without an agent then counts as lost
_AGENTS_COME_S = 0.5  # a new driver on another machine waits so long, or longer, for each next agent
_AGENTS_DIAL_S = 1.5  # the same, if it is no standby: an agent without a driver dials at least once in a second
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_METRICS = ("elasticstate.driver.metrics:metrics_served", "prometheus_client", "--metrics")
_DASHBOARD = ("elasticstate.driver.dashboard.server:Dashboard", "aiohttp", "--dashboard")


_DELAY_PER_WORKER_S = 1e-4  # delay of events that are not urgent
_LONGEST_DELAY_S = 1.0


class EventQueue:
    """Events that the core has not received yet. The main loop waits until it is time to pass them to the core."""

    def __init__(self) -> None:
        self._events: list[t.Event] = []
        self._ready_at: dict[int, float] = {}  # when a READY arrived, by its index
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # for events that can wait

    @property
    def events(self) -> Sequence[t.Event]:
        return self._events

    def post(self, event: t.Event) -> None:
        """Add an event that the core must receive at once."""
        if isinstance(event, t.FromWorker) and isinstance(event.body, t.Ready):
            self._ready_at[len(self._events)] = asyncio.get_running_loop().time()
        self._events.append(event)
        self.wake()

    def post_later(self, events: Iterable[t.Event], workers: int) -> None:
        """Add events that can wait, so that the core receives several at once.

        A step of the core takes time for each of the job's ``workers``.
        """
        self._events += events
        if self._timer is None:
            delay_s = min(_LONGEST_DELAY_S, _DELAY_PER_WORKER_S * workers)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.wake)

    def wake(self) -> None:
        """End the present or next call of ``wait``."""
        self._is_due.set()

    async def wait(self, deadline: float | None) -> None:
        """Wait for events, a call of ``wake``, or the deadline on the event loop's clock."""
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self.wake)
        await self._is_due.wait()
        self._is_due.clear()
        if timer is not None:
            timer.cancel()

    def take(self) -> list[t.Event]:
        """Remove all events, and return them in their order. READY names the present length of the worker's pause.

        A driver that reattaches waits for its agents, for a limited time, before it takes their first events.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._events = self._events, []
        ready_at, self._ready_at = self._ready_at, {}
        now = asyncio.get_running_loop().time()
        for index, at in ready_at.items():
            event = events[index]
            assert isinstance(event, t.FromWorker)
            assert isinstance(event.body, t.Ready)
            events[index] = replace(event, body=replace(event.body, paused_s=event.body.paused_s + now - at))
        return events


class Driver:
    """The driver of one job. ``await Driver(options).run()`` returns the exit status.

    Raises OptionError for unusable options.
    """

    def __init__(
        self,
        options: Options,
        must_reattach: bool = False,
        screen: Screen | None = None,
        elected: Elected | None = None,
    ) -> None:
        """``must_reattach``: raise OptionError if there is no dead driver; False: start a new job in that case.

        ``screen``: for a live line. ``elected``: the job of a driver on another machine, which this driver continues.
        """
        if reason := commit_directory.refuse(options.commit_dir):
            raise OptionError(
                f"--commit-dir: {options.commit_dir!r}: cannot hold commits: {reason}. Choose another directory."
            )
        names = (parse_host(text, 1).name for text in options.hosts)
        if options.standbys is not None and (name := next(filter(is_of_each_machine, names), "")):
            raise OptionError(
                f"--standbys: host {name!r} is another machine on each host, and a new driver on another machine must "
                "find all hosts. Name this machine as the others know it."
            )
        if options.standbys and options.call_directory is not None:
            raise OptionError("--standbys: launch() waits for elasticrun on this machine. Use 0, or leave it out.")
        if options.standbys is not None and options.backend == "mpi":
            raise OptionError("--standbys: not with --backend mpi, whose processes on elasticrun's machine are needed.")
        self._options = options
        self._must_reattach = must_reattach
        self._elected = elected
        self._job = options.job_name or f"job-{secrets.token_hex(3)}"
        self._loop = asyncio.get_running_loop()
        self._state = JobState(options.policy(), self._loop.time())
        self._report = Report(self._job, options.events_file, options.verbose)
        self._journal = Journal(self._report, self._state)
        self._outputs = OutputTroubles(self._report, self._journal)
        self._strangers = Strangers(options.connect_timeout_s, CountedLines(self._journal.warn).refused)
        self._queue = EventQueue()
        self._live_line = LiveLine(screen, self._state, self._report.log)
        self._hurry = asyncio.Event()  # set by the second signal to stop
        self._debugged: t.SlotId | None = None  # whose workers have --debug-rank's stdin, once that is known
        self._votes: Votes
        # made by _begin, when the driver holds the lock on the name of its job
        self._directory: JobDirectory
        self._source: HostSource
        self._keeper: Keeper
        self._agents: Agents
        self._backend: DriverBackend
        self._reattachment: Reattachment | None  # None: the job is new
        self._launch_results: LaunchResults | None  # only for launch()
        self._tails: Tails
        self._dashboard: Dashboard | None
        self._durable: DurableCopies
        self._standbys: Standbys

    async def run(self) -> int:
        allow_many_descriptors()
        async with self._outputs.watched(self._options.stop_timeout_s):
            with captured(self._report.terminal, self._journal.warn):
                async with await self._metrics_served():
                    return await self._run()

    async def _metrics_served(self) -> AbstractAsyncContextManager[None]:
        if self._options.metrics is None:
            return nullcontext()
        make = await in_thread(load_with_library, *_METRICS)
        metrics: AbstractAsyncContextManager[None] = make(
            self._options.metrics, self._job, self._state, self._strangers, self._report.log
        )
        return metrics

    async def _run(self) -> int:
        if self._options.dashboard is not None:
            await in_thread(load_with_library, *_DASHBOARD)
        directory = await in_thread(lock_job, self._job)
        try:
            return await self._run_in(directory)
        except ReplacedError as error:
            self._report.log(f"{error}. This driver ends, and the workers continue without it.")
            directory.forget()
            return 1

    async def _run_in(self, directory: JobDirectory) -> int:
        try:
            if self._elected is None:
                self._elected = await elected_here(self._options, self._must_reattach, directory, self._report.log)
            self._begin(directory)
        except BaseException:
            directory.give_back()
            raise
        async with self._dashboard_served():
            return await self._run_parts()

    async def _run_parts(self) -> int:
        self._listen_for_signals()
        if self._reattachment is None:
            self._report.started(self._options, _one_thread_each(self._options), self._state.stepped_at)
        try:
            # the agents of an earlier driver write to the terminal where that driver was started
            async with self._live_line.shown(has_other_writers=self._reattachment is not None):
                beside = [asyncio.ensure_future(self._durable.run())]
                if self._elected is not None:
                    beside.append(asyncio.ensure_future(self._elected.tell_the_last_driver()))
                try:
                    await self._main_loop()
                finally:
                    for task in beside:
                        task.cancel()
        except ReplacedError:
            raise
        except Exception:
            if self._keeper.record.agents:
                self._report.log(
                    "the driver has failed, and the workers continue without it. Start a new driver with elasticrun "
                    f"--reattach {self._job}."
                )
            else:
                await self._clean_up()
            raise
        outcome = self._state.outcome
        assert outcome is not None
        if self._launch_results is not None:
            timeout_s = self._options.heartbeat_timeout_s
            outcome = await self._launch_results.fetched(outcome, self._state.membership, timeout_s)
        await self._durable.finish(self._hurry)
        await self._clean_up()
        await self._report_outcome(outcome)
        return outcome.status

    def _begin(self, directory: JobDirectory) -> None:
        """Make the parts, and listen for agents, including those of the previous driver. Raises OptionError."""
        options, elected = self._options, self._elected
        last = directory.found if elected is None else elected.record
        self._directory, self._source = directory, host_source(options)
        if last is None and self._must_reattach:
            raise OptionError(
                f"--reattach: {self._job!r}: no earlier driver has left a record of this job. Name a job whose driver "
                "is dead."
            )
        record = first_record(options, self._job) if last is None else next_record(last, options, self._job)
        if elected is None:
            proposer = Proposer.first(secrets.token_hex(4), record.epoch, record.file)
        else:
            proposer = elected.proposer
            assert proposer.ballot is not None
            record = msgspec.structs.replace(record, epoch=proposer.ballot.number)
        self._votes = Votes(proposer, record.file, options.standbys is not None, self._queue.wake)
        directory.write_id(record.job_id)
        agents = self._agents = Agents(
            job_spec(self._job, record.job_id, record.epoch, options),
            record.token,
            directory.path,
            self._agent_event,
            self._received,
            self._status,
            self._journal.warn,
            self._report.log,
            self._votes,
            self._strangers,
        )
        self._backend = driver_part(options.backend)(
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
        self._launch_results = (
            LaunchResults(options.call_directory, agents.send) if options.call_directory is not None else None
        )
        agents.listen(record.ports)
        self._dashboard, port = None, 0
        if options.dashboard:
            from elasticstate.driver.dashboard.server import Dashboard

            self._dashboard = Dashboard(options.dashboard, record.dashboard_port, directory, self._report)
            port = self._dashboard.port
        record = msgspec.structs.replace(record, ports=agents.ports, dashboard_port=port)
        self._keeper = Keeper(
            directory,
            record,
            self._journal.warn,
            self._votes,
            agents.candidates,
            lambda acceptors: listed(sorted(map(self._keeper_named, acceptors))),
            options.elastic_timeout_s,
        )
        self._keeper.watch()
        seen_at = directory.seen_at if elected is None else time.time() - elected.silent_s
        self._reattachment = Reattachment(record, seen_at) if last is not None else None
        self._standbys = Standbys(options.standbys or 0, agents.send, agents.send_to_all, self._journal.warn)
        self._tails = Tails(agents.send)
        self._durable = DurableCopies(options, self._state, self._journal, agents.send)

    def _dashboard_served(self) -> AbstractAsyncContextManager[None]:
        if self._dashboard is None:
            return nullcontext()
        from elasticstate.driver.dashboard.charts import Sampler
        from elasticstate.driver.dashboard.server import Controls

        ahead_s = time.time() - self._loop.time()
        history, state = self._dashboard.history, self._state
        controls = Controls(
            view=lambda: view_of(self._job, state, history, self._loop.time(), ahead_s),
            worker_in=self._worker_in,
            tails=self._tails,
            drain=self._drain,
            end=self._end,
        )
        requires_token = self._options.dashboard_require_token
        sample = Sampler(history.charts, state)
        return self._dashboard.served(controls, self._keeper.record.token, requires_token, self._strangers, sample)

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
        self._stop(signal.SIGTERM, "the dashboard")
        return ""

    def _listen_for_signals(self) -> None:
        """Handle signals. The first one that stops the job stops the workers, the second one kills them.

        A world that trains has ``--stop-timeout``, in which its scripts may save and return: see core/phases.py.
        """
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
                self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGUSR1, lambda: self._report.log(self._status(as_json=False)))

    def _signalled(self, number: signal.Signals) -> None:
        if self._state.stopped is None and self._state.outcome is None:
            self._stop(number, number.name)
            return
        self._hurry.set()
        if self._votes.is_waiting:
            self._votes.replaced(f"{number.name}, while no majority of those that keep the record of this job answers")
        if self._state.outcome is None:
            self._state.outcome = self._state.stopped
            self._queue.wake()

    def _stop(self, number: signal.Signals, by: str) -> None:
        """Stop the job as this signal does. ``by``: what asks for it."""
        self._report.log(f"{by}: stopping the workers. A second signal kills them at once.")
        self._state.stopped = Outcome(128 + number, f"was stopped by {by}")
        self._queue.post(t.StopRequested(by))

    async def _clean_up(self) -> None:
        """End all processes of the job, and remove all its files."""
        await self._keeper.job_is_over(
            self._options.heartbeat_timeout_s
        )  # first: a driver killed now must not leave a record of removed commits
        await self._agents.stop(self._state.reason, self._hurry)
        await self._backend.stop()
        await in_thread(commit_directory.remove_job, self._options.commit_dir, self._keeper.record.job_id)
        await in_thread(self._directory.remove)

    async def _report_outcome(self, outcome: Outcome) -> None:
        now, membership = self._loop.time(), self._state.membership
        self._journal.event(event_file.GenerationFinished, **membership.ledger.account.until(now).fields())
        figures, epoch = figures_of(membership, now), self._keeper.record.epoch
        should_train = self._options.np > 1 and self._options.call_directory is None
        self._report.summary(figures, outcome, epoch, self._state.durable.unsaved, should_train)
        if outcome.root_cause is not None:
            self._report.root_cause(outcome.root_cause)
        if self._launch_results is not None:
            await in_thread(self._launch_results.write, outcome, self._report.failures)

    def _status(self, as_json: bool) -> str:
        state, now = self._state, self._loop.time()
        m, reason, copies = state.membership, state.reason, state.copies
        overview, figures = overview_of(self._job, m, reason, now, state.durable, copies, state.record)
        if as_json:
            return msgspec.json.encode(overview).decode() + "\n"
        durable = state.durable.lines(now) if self._options.durable_dir is not None else ()
        return status_text(self._job, m, figures, reason, now, self._outputs.lines(), durable, copies, state.record)

    # ------------------------------------------------------------------------------------------------------ main loop

    async def _main_loop(self) -> None:
        """Pass events to the core and carry out its effects, until the job has an outcome. Only this loop changes the
        core's state; all other code only posts events."""
        reattachment = self._reattachment
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
                self._votes.check()
                await self._step()
                if event := replications.look(self._state.membership.shards, self._state.stepped_at):
                    self._journal.event(event_file.Replication, **event)
        except DiscoveryError as error:
            cause = t.RootCause("the first call of host discovery failed", error=str(error))
            self._state.outcome = Outcome(FAILED, "failed", cause)
        finally:
            if event := replications.rest(self._loop.time()):
                self._journal.event(event_file.Replication, **event)
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
        state, now = self._state, self._loop.time()
        before = state.membership
        m, effects, state.reason = step(before, event, now)
        state.membership, state.stepped_at = m, now
        if m.ledger.highest != before.ledger.highest:
            state.committed_at = now
        has_new_activity = m.ledger.account.activity != before.ledger.account.activity
        has_new_layout = m.shards.layouts is not before.shards.layouts
        is_first_commit = self._keeper.record.highest is None and m.ledger.highest is not None
        if (
            effects or is_first_commit or has_new_activity or has_new_layout or self._keeper.is_due
        ):  # write first: the record must not be older than what the agents receive
            await self._keeper.keep(m, self._agents.ports, self._state.stepped_at, self._agents.places)
            self._standbys.look(self._agents.candidates)
            self._note_record()
        for effect in effects:
            self._carry_out(effect)
        self._report.reason(self._state.reason)

    def _keeper_named(self, acceptor: str) -> str:
        return host_name() if acceptor == self._votes.file else self._agents.host_of(acceptor)

    def _note_record(self) -> None:
        """Report who keeps the record, if that has changed."""
        if not self._votes.is_replicated:
            return
        keepers = tuple(sorted(map(self._keeper_named, self._votes.keepers())))
        record = RecordOverview(keepers, self._standbys.known_to(keepers))
        if record != self._state.record:
            self._state.record = record
            self._journal.event(event_file.RecordKept, hosts=list(record.hosts), standbys=list(record.standbys))

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
        state, now = self._state, self._loop.time()
        remains = reattachment.remains((now, time.time()))
        state.membership, effects, state.reason = reattach(self._options.policy(), remains, now)
        state.stepped_at = now
        agents = self._agents
        await self._keeper.keep(self._state.membership, agents.ports, self._state.stepped_at, agents.places)
        lost = lost_hosts(self._queue.events)
        self._journal.event(
            event_file.DriverRestarted, epoch=record.epoch, host=host_name(), back=reattachment.back(), lost=lost
        )
        reattachment.is_over = True
        for effect in effects:
            self._carry_out(effect)
        self._queue.wake()

    async def _wait_for_agents(self, reattachment: Reattachment) -> None:
        """Wait until each agent of the previous driver is back or lost, or until a signal stops the job."""
        limit_s = absent_s = min(_REATTACH_TIMEOUT_S, self._options.driver_timeout_s)  # no agent waits for longer
        elected, heartbeat_s = self._elected, self._options.heartbeat_timeout_s
        if elected is not None:  # who lives has missed the last driver by then
            come_s = _AGENTS_COME_S if elected.stood_by else _AGENTS_DIAL_S
            absent_s = min(limit_s, max(come_s, heartbeat_s / 10, heartbeat_s - elected.silent_s))
        begin, came_at, number = self._loop.time(), 0.0, 0
        while awaited := reattachment.awaited(lost_hosts(self._queue.events)):
            if len(awaited) != number:  # an agent has come; another one of a busy machine may be as late
                number, came_at = len(awaited), self._loop.time()
            absent = [host for host in awaited if elected is not None and host not in elected.hosts]
            self._state.reason = f"waiting for the agents of {listed(awaited)}, which belonged to the previous driver"
            self._report.reason(self._state.reason)
            absent_at, limit_at = min(came_at + absent_s, begin + limit_s), begin + limit_s
            await self._queue.wait(absent_at if absent else limit_at)
            if self._state.stopped is not None:  # there is no world to stop yet
                self._state.outcome = self._state.stopped
                return
            for due_at, limit, hosts in ((absent_at, absent_s, absent), (limit_at, limit_s, awaited)):
                if self._loop.time() >= due_at:
                    for host in set(hosts).intersection(reattachment.awaited(lost_hosts(self._queue.events))):
                        self._agents.give_up(host, f"did not reconnect within {limit:g} s")

    # --------------------------------------------------------------------------------------------- messages of agents

    def _agent_event(self, event: t.Event) -> None:
        """Handle an event of the agents' connections and processes."""
        if isinstance(event, t.AgentLost):
            self._standbys.host_lost(event.host)
            self._backend.host_lost(event.host)
            self._outputs.forget(event.host)
            self._durable.host_lost(event.host)
            self._state.copies.host_lost(event.host)
            self._state.readings.host_lost(event.host)
        self._queue.post(event)

    def _received(self, host: str, message: messages.FromAgent) -> None:
        """Handle a message of the agent of a host, now or when the backend says so."""
        for due in self._backend.due_messages(host, message, self._state.membership.world):
            self._handle(host, due)

    def _handle(self, host: str, message: messages.FromAgent) -> None:
        match message:
            case t.FromWorker():  # nearly always
                self._queue.post(message)
            case messages.BesidesCore(worker, body):
                self._besides_core(worker, body)
            case messages.Stamps(stamps, number, copies):
                self._state.copies.update(host, copies, asyncio.get_running_loop().time())
                if name := self._state.readings.update(host, message, self._state.membership, time.time()):
                    about = f"the workers have reported {messages.MOST_METRICS} names already, and no more are shown"
                    self._journal.warn(f"report_metric({name!r}): {about}. Report the same names on all ranks")
                if number:
                    self._agents.send(host, messages.Acknowledgement(number))
                if self._reattachment is None or self._reattachment.is_over:  # else: more of them will arrive
                    heartbeats = [t.FromWorker(worker, stamp) for worker, stamp in stamps]
                    self._queue.post_later(heartbeats, len(self._state.membership.workers))
            case messages.HostReport():
                self._host_joined(host, message)
            case messages.Started(worker, pid):
                self._journal.worker_lives(worker, pid)
            case messages.WorkerExited():
                self._worker_exited(host, message)
            case messages.NextStore(address):
                self._state.stores[host] = address
            case messages.StandbyListens():
                self._standbys.received(host, message, self._state.copy_servers.get(host, "").rpartition(":")[0])
                self._note_record()
            case messages.StandbysKnown(addresses):
                self._standbys.known(host, addresses)
                self._note_record()
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
            case _ if not isinstance(message, messages.Vote | messages.CouldNotStart):  # agents.py has handled these
                self._queue.post(message)

    def _host_joined(self, host: str, report: messages.HostReport) -> None:
        """Post the events of an agent that was started, or that has reconnected with its workers."""
        self._outputs.forget(host)
        self._journal.agent_joined(host, self._agents.pid_of(host))
        self._state.stores[host] = report.store
        self._state.copy_servers[host] = report.copies_address
        self._standbys.host_joined(host)
        if self._reattachment is not None:
            self._reattachment.joined(host, report)
        for exited in report.exits:  # exits first: another worker may live in that slot
            self._worker_exited(host, exited)
        returned = tuple((worker.worker, worker.generation) for worker in report.workers)
        found = (report.commits, returned, report.incarnations, report.previous, report.kept)
        self._queue.post(t.AgentJoined(host, *found))
        for worker_id, attached in report.attached:
            self._queue.post(t.FromWorker(worker_id, attached))
        if report.store_joined:
            self._queue.post(t.PlainStoreJoined(report.store_joined))
        for worker in report.workers:
            self._journal.worker_lives(worker.worker, worker.pid)
            for report_of_worker in (worker.stamp, *worker.lasting):
                self._queue.post(t.FromWorker(worker.worker, report_of_worker))

    def _worker_exited(self, host: str, exited: messages.WorkerExited) -> None:
        self._journal.worker_exited(exited)
        self._backend.worker_ended(host, exited.pid)
        self._queue.post(exited)

    def _besides_core(self, worker: t.WorkerId, body: messages.Aside) -> None:
        match body:
            case messages.CommitSize(size, _):
                self._state.record_commit_size(size)
            case messages.Synced(generation, size, seconds):
                self._journal.event(
                    event_file.Sync, worker=str(worker), generation=generation, bytes=size, seconds=seconds
                )
            case messages.BackendRequest(data):
                self._backend.request(data)

    # -------------------------------------------------------------------------------------------- effects of the core

    def _carry_out(self, effect: t.Effect) -> None:
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
                agents.send(worker.host, messages.ToWorkers((worker,), effect))
            case t.Terminate():
                for worker in self._state.membership.workers:
                    self._report.expect_end(worker)
                agents.broadcast(effect)
            case t.Hold() | t.Release() | t.End() | t.OpenGate() | t.AskWhere():
                agents.broadcast(effect)
            case t.WatchCalls() | t.StopReplication() | t.CommitsCompared():
                agents.send_to_all(effect)
            case t.ConfirmOwnError(worker):
                agents.send(worker.host, messages.ToWorkers((worker,), effect))
            case t.Sever(worker, generation, cause):
                agents.send(worker.host, messages.ToWorkers((worker,), t.End(generation, None, cause)))
            case t.AskDigests(worker):
                agents.send(worker.host, effect)
            case t.ProbeLinks():
                self._probe(effect)
            case t.CheckHealth(host):
                agents.send(host, effect)
            case t.Replicate(commit, copies):
                self._replicate(commit, copies)
            case t.ForgetCopies(host=host):
                agents.send(host, effect) if host else agents.send_to_all(effect)
            case t.World():
                self._publish(effect)
            case t.EndJob(succeeded, cause, own_error):
                failed = Outcome(OWN_ERROR if own_error else FAILED, "failed", cause)
                self._state.outcome = self._state.stopped or (Outcome(0, "succeeded") if succeeded else failed)

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
        return msgspec.structs.replace(
            effect,
            reserve_bytes=0 if is_shared else size,
            place=place,
            fit_bytes=fit_bytes,
            has_stdin=self._has_stdin(effect),
            slots=m.hosts[effect.worker.host].slots,
        )

    def _has_stdin(self, effect: t.StartWorker) -> bool:
        """Return True if a worker gets stdin: all in the slot that has ``--debug-rank`` in the first world.

        The job fails if another program, such as ssh or srun, has started the agent of that slot.
        """
        rank, worker, place = self._options.debug_rank, effect.worker, effect.place
        if rank is None:
            return False
        is_single = self._options.has_one_worker
        if self._debugged is None and (is_single or (place is not None and place.rank == rank)):
            self._debugged = worker.slot_id
            if not self._agents.is_local(worker.host):
                reason = (
                    f"--debug-rank {rank}: the worker with this rank is on host {worker.host}, whose agent elasticrun "
                    "has not started itself, so it cannot read this terminal. Give a rank of another host, or call "
                    "debugpy.listen(5678) in the script, and attach an editor by way of "
                    f"ssh -L 5678:localhost:5678 {worker.host}"
                )
                self._state.outcome = Outcome(FAILED, "failed", t.RootCause(reason))
            elif not is_single:
                self._report.log(
                    f"--debug-rank {rank}: {worker} reads the terminal; limits of waits are a week, or off"
                )
        return is_single or worker.slot_id == self._debugged

    def _probe(self, order: t.ProbeLinks) -> None:
        servers = self._state.copy_servers
        for host, peers in order.peers:
            targets = tuple((peer, address) for peer in peers if (address := servers.get(peer)))
            self._agents.send(host, messages.ProbeOrder(order.number, targets, order.limit_s))

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
            self._agents.send(host, messages.ReplicateOrder(commit, tuple(its)))

    def _publish(self, world: t.World) -> None:
        workers = self._state.membership.workers.values()
        self._backend.before_world(worker.id for worker in workers if worker.late)
        _spare_garbage_collection(world.size)
        options = t.MemberOptions(
            collective_timeout_s=self._options.collective_timeout_s,
            regroup_timeout_s=self._options.regroup_timeout_s,
            verify_sync=self._options.verify_sync,
            records_ticks=self._options.tick_records and self._options.lease_s is None,
            compares_commits=self._options.divergence != "off",
            awaits_verdicts=self._options.divergence == "restore",
        )
        for host, part in parts_of(world, options, self._state.copy_servers):
            self._agents.send(host, part)


def job_spec(job: str, job_id: str, epoch: int, options: Options) -> messages.JobSpec:
    """Return the first message to each agent."""
    return messages.JobSpec(
        job=job,
        job_id=job_id,
        epoch=epoch,
        options=dataclasses.replace(
            options,
            commit_dir=str(Path(options.commit_dir).absolute()),
            log_dir=str(Path(options.log_dir).absolute()) if options.log_dir else None,
        ),
        environment=tuple(_environment_of_workers(options)),
        call=function_to_call(options),
    )


def _environment_of_workers(options: Options) -> Iterator[tuple[str, str]]:
    """Yield the environment variables of all workers."""
    if _one_thread_each(options):
        yield "OMP_NUM_THREADS", "1"
    yield COMMIT_DEVICE_MEMORY, str(options.commit_device_memory)
    yield from options.timeline_variables().items()
    yield from driver_part(options.backend).worker_variables().items()


def _one_thread_each(options: Options) -> bool:
    """Return True if each worker gets one thread, as with torchrun: several workers would compete for the cores."""
    return options.max_np != 1 and "OMP_NUM_THREADS" not in inherited_environment()


def _spare_garbage_collection(workers: int) -> None:
    """Raise the threshold of the garbage collector for many workers (docs/decisions/membership.md)."""
    gc.set_threshold(max(700, 10 * workers), 10, 10)  # Python's own thresholds: 700, 10, 10
