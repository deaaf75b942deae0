"""The driver: the asyncio shell around the core.

Each thing that happens becomes an event in one queue. All queued events are passed to the core in one step, and its
effects are carried out in their order. One coroutine owns the state; everything else only posts events.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Iterable
from typing import Any

import msgspec

from elasticstate import commits as commit_directory
from elasticstate.config import Options
from elasticstate.core import types as t
from elasticstate.core.accounting import losses
from elasticstate.core.diagnostics import listed
from elasticstate.core.membership import new_membership, next_deadline, step
from elasticstate.core.reattach import reattach
from elasticstate.driver import spec
from elasticstate.driver.agents import Agents
from elasticstate.driver.discovery import Discovery
from elasticstate.driver.events import event_of, heartbeat
from elasticstate.driver.goodput import Goodput
from elasticstate.driver.identities import IdentityBroker
from elasticstate.driver.launch_results import LaunchResults
from elasticstate.driver.mpirun import Mpirun
from elasticstate.driver.output_troubles import OutputTroubles
from elasticstate.driver.reattach import Keeper, Reattachment, first_record, lock_job, lost_hosts, next_record
from elasticstate.driver.record import JobDirectory
from elasticstate.driver.report import Outcome, Report, Totals
from elasticstate.driver.status import status_text
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.net import messages
from elasticstate.net.names import is_this_machine
from elasticstate.processes import allow_many_descriptors
from elasticstate.threads import in_thread

_DELAY_PER_WORKER_S = 1e-4  # delay of events that are not urgent
_LONGEST_DELAY_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Driver:
    """The driver of one job. ``await Driver(options).run()`` returns the exit status.

    Raises OptionError for unusable options.
    """

    def __init__(self, options: Options, must_reattach: bool = False) -> None:
        """``must_reattach``: raise OptionError if there is no dead driver; False: start a new job in that case."""
        if reason := commit_directory.refuse(options.commit_dir):
            raise OptionError(f"--commit-dir: {options.commit_dir!r}: takes a directory to keep commits in: {reason}")
        self._options = options
        self._must_reattach = must_reattach
        self._job = options.job_name or f"job-{secrets.token_hex(3)}"
        self._report = Report(self._job, options.events_file, options.verbose)
        self._outputs = OutputTroubles(self._report, self._event)
        self._m = new_membership(options.policy())
        self._reason = ""
        self._stepped_at = 0.0
        self._queue: list[t.Event] = []
        self._wake = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None  # timer for events that can wait
        self._outcome: Outcome | None = None
        self._hurry = asyncio.Event()  # second Ctrl-C
        self._commit_bytes = 0  # size of a commit of the largest worker
        self._pids: dict[str, int] = {}  # of workers, by their names in the event file
        self._ends: dict[str, messages.Exited] = {}  # ends that the core has not noted yet
        self._launch_results: LaunchResults | None = None  # only for launch()

    async def run(self) -> int:
        async with self._outputs.watched(self._options.stop_timeout_s):
            return await self._run()

    async def _run(self) -> int:
        self._loop = asyncio.get_running_loop()
        started_at = self._loop.time()
        self._goodput = Goodput(started_at)
        allow_many_descriptors()
        directory = await in_thread(lock_job, self._job)
        try:
            self._begin(directory)
        except BaseException:
            directory.give_back()
            raise
        self._listen_to_signals()
        try:
            await self._until_over()
        except Exception:
            if self._keeper.record.agents:
                self._report.say(f"has failed, its workers train on: elasticrun --reattach {self._job} takes over")
            else:
                await self._clear_up(directory)
            raise
        if self._launch_results is not None and self._outcome is not None:
            timeout_s = self._options.heartbeat_timeout_s
            self._outcome = await self._launch_results.fetched(self._outcome, self._m, timeout_s)
        await self._clear_up(directory)
        return await self._close(started_at)

    async def _clear_up(self, directory: JobDirectory) -> None:
        await self._keeper.job_is_over()  # first: a driver killed on the way must not leave a record of removed commits
        await self._agents.stop(self._reason, self._hurry)
        await self._identities.stop()
        await in_thread(commit_directory.remove_job, self._options.commit_dir, self._keeper.record.job_id)
        await in_thread(directory.remove)

    def _begin(self, directory: JobDirectory) -> None:
        """Set up the job, and listen for agents, including those of the previous driver. Raises OptionError."""
        options, last = self._options, directory.found
        if last is None and self._must_reattach:
            raise OptionError(f"--reattach: {self._job!r}: takes a job that has lost its driver")
        record = first_record(options, self._job) if last is None else next_record(last, options, self._job)
        directory.write_id(record.job_id)
        self._agents = Agents(
            spec.job_spec(self._job, record.job_id, record.epoch, options),
            options,
            record.token,
            directory.path,
            self._post,
            self._from_agent,
            self._status,
            self._warn,
            self._report.say,
        )
        if options.call_directory is not None:
            self._launch_results = LaunchResults(options.call_directory, self._agents.send)
        mpirun = Mpirun(directory.path, options.connect_timeout_s, is_new_job=last is None)
        limit_s, workers = options.start_timeout_s, lambda: self._m.workers
        self._identities = IdentityBroker(mpirun, self._agents, record.token, limit_s, workers, self._warn)
        self._agents.listen(record.ports)
        record = msgspec.structs.replace(record, ports=self._agents.ports)
        self._keeper = Keeper(directory, record, self._warn)
        self._keeper.watch()
        self._reattachment = Reattachment(record) if last is not None else None

    # ------------------------------------------------------------------------------------------------- the main loop

    async def _until_over(self) -> None:
        discovery = Discovery(self._options, self._agents.refuse, self._warn)
        if self._reattachment is None:
            self._report.started(self._options, spec.one_thread_each(self._options))
        else:
            discovery.believe(self._reattachment.record.hosts)
            await self._reattach(self._reattachment)
        following = asyncio.ensure_future(self._follow(discovery))
        following.add_done_callback(lambda _: self._wake.set())
        try:
            while self._outcome is None:
                await self._something()
                if following.done():
                    following.result()  # raise its exception, if any
                self._agents.check()
                await self._step()
        except DiscoveryError as error:
            self._outcome = Outcome(
                1, "failed", t.RootCause("the first call of host discovery failed", error=str(error))
            )
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, discovery: Discovery) -> None:
        if self._reattachment is None:
            hosts = await discovery.first()
            if not all(is_this_machine(host.name) for host in hosts):
                self._agents.open()
            self._post(t.HostsDiscovered(hosts))
        async for hosts in discovery.changes():
            self._post(t.HostsDiscovered(hosts))

    async def _reattach(self, reattachment: Reattachment) -> None:
        """Wait for the agents of the previous driver; then let the core continue from its state."""
        record, limit_s = reattachment.record, self._options.reattach_timeout_s
        self._agents.expect(record.agents)
        self._report.say(f"job {self._job} has lost its driver: waits for the agents of {listed(list(record.agents))}")
        deadline = self._loop.time() + limit_s
        timer = self._loop.call_at(deadline, self._wake.set)
        while awaited := reattachment.awaited(lost_hosts(self._queue)):
            self._reason = f"waits for the agents of {listed(awaited)}, which the last driver had"
            self._report.reason(self._reason)
            await self._wake.wait()
            self._wake.clear()
            if self._outcome is not None:
                return
            if self._loop.time() >= deadline:
                for host in reattachment.awaited(lost_hosts(self._queue)):
                    self._agents.give_up(host, f"was not back within --reattach-timeout of {limit_s:g} s")
        timer.cancel()
        for host in set(reattachment.lost()).difference(lost_hosts(self._queue)):
            self._agents.give_up(host, "was out of touch when the driver was restarted")
        self._stepped_at = self._loop.time()
        self._m, effects, self._reason = reattach(self._options.policy(), reattachment.remains(), self._stepped_at)
        self._event("driver_restarted", epoch=record.epoch, back=reattachment.back(), lost=lost_hosts(self._queue))
        reattachment.is_over = True
        for effect in effects:
            self._carry_out(effect)
        self._wake.set()

    async def _something(self) -> None:
        """Wait for an event, or for the core's deadline."""
        deadline = next_deadline(self._m)
        timer = None if deadline is None else self._loop.call_at(deadline, self._wake.set)
        await self._wake.wait()
        self._wake.clear()
        if timer is not None:
            timer.cancel()

    def _post(self, event: t.Event) -> None:
        if isinstance(event, t.AgentLost):
            self._identities.host_lost(event.host)
            self._outputs.forget(event.host)
        self._queue.append(event)
        self._wake.set()

    def _post_soon(self, events: Iterable[t.Event]) -> None:
        """Post events that can wait, to pass several at once to the core: each step costs time for each worker."""
        self._queue += events
        if self._soon is None:
            delay_s = min(_LONGEST_DELAY_S, _DELAY_PER_WORKER_S * len(self._m.workers))
            self._soon = self._loop.call_later(delay_s, self._wake.set)

    async def _step(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        events, self._queue = [*self._agents.news(), *self._queue], []
        event = t.Several(tuple(events)) if events else t.TimePassed()
        self._stepped_at = self._loop.time()
        self._m, effects, self._reason = step(self._m, event, self._stepped_at)
        await self._carry_out_all(effects)
        self._report.reason(self._reason)

    async def _carry_out_all(self, effects: tuple[t.Effect, ...]) -> None:
        is_first_commit = self._keeper.record.highest is None and self._m.ledger.highest is not None
        if effects or is_first_commit:  # write first: the record must not be older than what the agents receive
            await self._keeper.keep(self._m, self._agents.ports)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: t.Effect) -> None:
        agents = self._agents
        match effect:
            case t.Note(name, fields):
                self._note(name, dict(fields))
            case t.StartAgent(host):
                agents.start(host)
            case t.StopAgent(host, reason):
                agents.stop_host(host, reason)
            case t.StartWorker(worker):
                agents.send(worker.host, msgspec.structs.replace(effect, reserve_bytes=self._commit_bytes))
            case t.StopWorker(worker):
                self._report.sent_away(worker)
                agents.send(worker.host, effect)
            case t.Leave(worker):
                self._report.sent_away(worker)
                agents.send(worker.host, messages.ToWorkers((worker,), effect))
            case t.Hold() | t.Release() | t.End():
                agents.broadcast(effect)
            case t.ConfirmOwnError(worker):
                agents.send(worker.host, messages.ToWorkers((worker,), effect))
            case t.Sever(worker, generation, cause):
                agents.send(worker.host, messages.ToWorkers((worker,), t.End(generation, None, cause)))
            case t.OpenGate():
                self._goodput.end(self._loop.time())
                agents.broadcast(effect)
            case t.PublishWorld(world):
                self._identities.dismiss(worker.id for worker in self._m.workers.values() if worker.late)
                spec.spare_garbage_collection(world.size)
                for host, worlds in spec.world_messages(self._job, world, self._options):
                    agents.send(host, worlds)
            case t.EndJob(succeeded, cause):
                self._outcome = Outcome(0 if succeeded else 1, "succeeded" if succeeded else "failed", cause)

    # -------------------------------------------------------------------------------------------- messages of agents

    def _from_agent(self, host: str, message: messages.FromAgent) -> None:
        for each in self._identities.heard(host, message, self._m.world):
            self._said(host, each)

    def _said(self, host: str, message: messages.FromAgent) -> None:
        match message:
            case messages.HostReport(commits, workers, exits, incarnations):
                self._outputs.forget(host)
                if self._reattachment is not None:
                    self._reattachment.joined(host, message)
                for exited in exits:  # exits first: another worker may live in that slot
                    self._said(host, exited)
                returned = tuple((report.worker, report.generation) for report in workers)
                self._post(t.AgentJoined(host, commits, returned, incarnations))
                for report in workers:
                    self._returned(report)
            case messages.FromWorker(worker, body):
                self._from_worker(worker, body)
            case messages.Stamps(stamps, number):
                if number:
                    self._agents.send(host, messages.Heard(number))
                if self._reattachment is not None and not self._reattachment.is_over:
                    return  # more of them will come
                for _, stamp in stamps:
                    self._goodput.ticks(stamp.generation, stamp.ticks)
                self._post_soon([heartbeat(worker, stamp) for worker, stamp in stamps])
            case messages.Started(worker, pid):
                self._pids[str(worker)] = pid
            case messages.Exited(worker, pid, exit_code, number, error, time_ns):
                self._pids[str(worker)], self._ends[str(worker)] = pid, message
                self._identities.worker_ended(host, pid)
                self._post(t.WorkerExited(worker, exit_code, number, error, time_ns))
            case messages.Unresponsive(worker, reason):
                self._post(t.WorkerUnresponsive(worker, reason))
            case messages.HostPreemptionNotice(reason):
                self._post(t.HostDraining(host, reason))
            case messages.AgentWarning(text):
                self._report.warn_once(host, text, self._m.generation)
            case messages.OutputTrouble():
                self._outputs.heard(host, message)
            case messages.Fetched():
                if self._launch_results is not None:
                    self._launch_results.heard(host, message)

    def _returned(self, report: messages.WorkerReport) -> None:
        """Post the events of a worker that has outlived the loss of the connection to its agent."""
        worker, stamp = report.worker, report.stamp
        self._pids[str(worker)] = report.pid
        self._post(heartbeat(worker, stamp))
        for body in report.lasting:
            self._from_worker(worker, body)

    def _from_worker(self, worker: t.WorkerId, body: messages.FromWorkerBody) -> None:
        match body:
            case messages.Ready(generation, ticks=ticks, paused_s=paused_s):
                self._goodput.ticks(generation, ticks)
                self._goodput.left(generation, self._loop.time() - paused_s)
            case messages.First(generation):
                self._goodput.first_tick(generation, self._loop.time())
            case messages.CommitSize(size):
                self._commit_bytes = max(self._commit_bytes, size)
            case messages.Synced(generation, size, seconds):
                self._event("sync", worker=str(worker), generation=generation, bytes=size, seconds=seconds)
            case messages.AskIdentities(members):
                self._identities.ask(members)
        event = event_of(worker, body)
        if event is not None:
            self._post(event)

    # --------------------------------------------------------------------------------------------- events and status

    def _note(self, name: str, fields: dict[str, Any]) -> None:
        if name == "world_formed" or (name == "end" and fields["at"] == "now"):
            self._goodput.end(self._loop.time())
        elif name == "training_resumed":
            self._goodput.lost(fields["ticks_lost"])
        elif name == "agent_joined":
            fields["pid"] = self._agents.pid_of(fields["host"])
        elif name == "worker_exited":
            end = self._ends.pop(fields["worker"], None)
            fields["pid"] = self._pids.pop(fields["worker"], None)
            fields["error"], fields["time_ns"] = (end.error, end.time_ns) if end is not None else ("", 0)
        self._report.event(name, fields, self._stepped_at)

    def _event(self, name: str, **fields: object) -> None:
        self._report.event(name, {"generation": self._m.generation, **fields})

    def _warn(self, text: str) -> None:
        self._event("warning", text=text)

    def _status(self) -> str:
        return status_text(self._job, self._m, self._reason, self._loop.time(), self._outputs.lines())

    async def _close(self, started_at: float) -> int:
        now, outcome = self._loop.time(), self._outcome
        assert outcome is not None
        self._goodput.lost(self._m.ledger.losses.ticks)  # of a world that ended before these ticks were redone
        totals = Totals(self._m.generation, losses(self._m, self._stepped_at), self._goodput.share(now))
        self._report.summary(totals, outcome, now - started_at, self._keeper.record.epoch)
        if outcome.root_cause is not None:
            self._report.root_cause(outcome.root_cause)
        if self._launch_results is not None:
            await in_thread(self._launch_results.write, outcome, self._report.failures)
        return outcome.status

    def _listen_to_signals(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
                self._loop.add_signal_handler(number, self._stop_by_signal, number)
        self._loop.add_signal_handler(signal.SIGUSR1, lambda: self._report.say(self._status()))

    def _stop_by_signal(self, number: signal.Signals) -> None:
        if self._outcome is not None:
            self._hurry.set()
            return
        self._report.say(f"{number.name}: stops the workers; a second one kills them at once")
        self._outcome = Outcome(128 + number, f"was stopped by {number.name}")
        self._reason = self._outcome.word
        self._wake.set()
