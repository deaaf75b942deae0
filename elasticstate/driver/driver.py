"""The driver: the asyncio shell around the core.

All that happens becomes an event in one queue. What has queued up is entered in one step of the core, and what the core
says is carried out, in its order. One coroutine owns the state; everything else only posts events.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from elasticstate import commits as commit_directory
from elasticstate.config import Options, inherited_environment
from elasticstate.core import types as t
from elasticstate.core.membership import new_membership, next_deadline, step
from elasticstate.driver.agents import Agents
from elasticstate.driver.discovery import Discovery
from elasticstate.driver.goodput import Goodput
from elasticstate.driver.record import JobDirectory, Record
from elasticstate.driver.report import Report
from elasticstate.driver.status import status_text
from elasticstate.errors import DiscoveryError, OptionError
from elasticstate.net import messages
from elasticstate.net.names import is_this_machine
from elasticstate.net.runs import as_runs
from elasticstate.processes import signal_name

_DELAY_PER_WORKER_S = 1e-4  # of what is not urgent
_LONGEST_DELAY_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended."""

    status: int
    word: str  # succeeded, failed, or what made it stop
    root_cause: t.RootCause | None = None


class Driver:
    """One job: ``await Driver(options).run()`` returns the exit status.

    Raises OptionError for what cannot be used.
    """

    def __init__(self, options: Options) -> None:
        if reason := commit_directory.refuse(options.commit_dir):
            raise OptionError(f"--commit-dir: {options.commit_dir!r}: takes a directory to keep commits in: {reason}")
        self._options = options
        self._job_id = secrets.token_hex(8)
        self._job = options.job_name or f"job-{secrets.token_hex(3)}"
        self._report = Report(self._job, options.events_file, options.verbose)
        self._m = new_membership(options.policy())
        self._reason = ""
        self._queue: list[t.Event] = []
        self._wake = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None  # when the events that can wait are looked at
        self._outcome: Outcome | None = None
        self._hurry = asyncio.Event()  # Ctrl-C for the second time
        self._commit_bytes = 0  # what a commit takes in the largest worker
        self._warned: set[str] = set()  # what agents have warned of
        self._pids: dict[str, int] = {}  # of workers, by their names in the event file

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        started_at = self._loop.time()
        self._goodput = Goodput(started_at)
        directory = JobDirectory(self._job, self._job_id)
        try:
            self._agents = Agents(
                self._job_spec(),
                self._options,
                directory.path,
                self._post,
                self._from_agent,
                self._status,
                self._warn,
                self._report.say,
            )
            directory.write(Record(self._agents.listen(), self._agents.token))
            self._listen_to_signals()
            await self._until_over()
        finally:
            await self._agents.stop(self._reason, self._hurry)
            commit_directory.remove_job(self._options.commit_dir, self._job_id)
            directory.remove()
        return self._close(started_at)

    # -------------------------------------------------------------------------------------------------- the one loop

    async def _until_over(self) -> None:
        options = self._options
        discovery = Discovery(options, self._agents.refuse, self._warn)
        self._event(
            "job_started",
            pid=os.getpid(),
            command=list(options.command),
            np=options.np,
            min_np=options.min_np,
            max_np=options.max_np,
        )
        self._say_threads()
        following = asyncio.ensure_future(self._follow(discovery))
        following.add_done_callback(lambda _: self._wake.set())
        try:
            while self._outcome is None:
                await self._something()
                if following.done():
                    following.result()  # whatever it raised
                self._step()
        except DiscoveryError as error:
            self._outcome = Outcome(
                1, "failed", t.RootCause("the first call of host discovery failed", error=str(error))
            )
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, discovery: Discovery) -> None:
        hosts = await discovery.first()
        if not all(is_this_machine(host.name) for host in hosts):
            self._agents.open()
        self._post(t.HostsDiscovered(hosts))
        async for hosts in discovery.changes():
            self._post(t.HostsDiscovered(hosts))

    async def _something(self) -> None:
        """Wait for an event, or for the core's deadline."""
        deadline = next_deadline(self._m)
        timer = None if deadline is None else self._loop.call_at(deadline, self._wake.set)
        await self._wake.wait()
        self._wake.clear()
        if timer is not None:
            timer.cancel()

    def _post(self, event: t.Event) -> None:
        self._queue.append(event)
        self._wake.set()

    def _post_soon(self, event: t.Event) -> None:
        """In its turn, but with others of its kind: a step costs time for each worker there is."""
        self._queue.append(event)
        if self._soon is None:
            delay_s = min(_LONGEST_DELAY_S, _DELAY_PER_WORKER_S * len(self._m.workers))
            self._soon = self._loop.call_later(delay_s, self._wake.set)

    def _step(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        events, self._queue = self._queue, []
        event = t.Several(tuple(events)) if events else t.TimePassed()
        self._m, effects, self._reason = step(self._m, event, self._loop.time())
        for effect in effects:
            self._carry_out(effect)
        self._report.reason(self._reason)

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
                agents.send(worker.host, messages.Spawn(worker, self._commit_bytes))
            case t.StopWorker(worker, reason, kill):
                self._report.sent_away(worker)
                agents.send(worker.host, messages.Stop(worker, reason, kill))
            case t.Leave(worker):
                self._report.sent_away(worker)
                agents.send(worker.host, messages.ToWorkers((worker,), messages.LeaveOrder()))
            case t.ConfirmOwnError(worker, generation):
                agents.send(worker.host, messages.ToWorkers((worker,), messages.OwnError(generation)))
            case t.Hold(generation):
                agents.broadcast(messages.HoldOrder(generation))
            case t.Release(generation):
                agents.broadcast(messages.ReleaseOrder(generation))
            case t.End(generation, at_tick, cause):
                agents.broadcast(messages.EndOrder(generation, at_tick, cause))
            case t.Sever(worker, generation, cause):
                agents.send(worker.host, messages.ToWorkers((worker,), messages.EndOrder(generation, None, cause)))
            case t.OpenGate(generation):
                self._goodput.end(self._loop.time())
                agents.broadcast(messages.GateOpen(generation))
            case t.PublishWorld(world):
                self._publish(world)
            case t.EndJob(succeeded, cause):
                self._outcome = Outcome(0 if succeeded else 1, "succeeded" if succeeded else "failed", cause)

    def _publish(self, world: t.World) -> None:
        lacking = as_runs(world.lacking)
        for host, members in groupby(world.members, key=lambda placement: placement.worker.host):
            parts = tuple((placement.worker, self._part(world, placement, lacking)) for placement in members)
            self._agents.send(host, messages.WorldsOnHost(parts))

    def _part(
        self, world: t.World, placement: t.Placement, lacking: tuple[tuple[int, int], ...]
    ) -> messages.WorldMessage:
        return messages.WorldMessage(
            job=self._job,
            generation=world.generation,
            placement=placement,
            size=world.size,
            root=world.root,
            lacking=lacking,
            store=world.store,
            collective_timeout_s=self._options.collective_timeout_s,
            regroup_timeout_s=self._options.regroup_timeout_s,
            verify_sync=self._options.verify_sync,
        )

    # ------------------------------------------------------------------------------------------- what the agents say

    def _from_agent(self, host: str, message: messages.FromAgent) -> None:
        match message:
            case messages.Serving(commits, workers):
                returned = tuple((report.worker, report.generation) for report in workers)
                self._post(t.AgentJoined(host, commits, returned))
                for report in workers:
                    self._returned(report)
            case messages.FromWorker(worker, body):
                self._from_worker(worker, body)
            case messages.Stamps(stamps):
                for worker, stamp in stamps:
                    self._goodput.ticks(stamp.generation, stamp.ticks)
                    place = stamp.place.name.lower()
                    self._post_soon(t.Heartbeat(worker, place, stamp.generation, stamp.ticks, stamp.commit))
            case messages.Started(worker, pid):
                self._pids[str(worker)] = pid
            case messages.Exited(worker, pid, exit_code, number, error):
                self._pids[str(worker)] = pid
                self._post(t.WorkerExited(worker, exit_code, number, error))
            case messages.Unresponsive(worker, reason):
                self._post(t.WorkerUnresponsive(worker, reason))
            case messages.AgentNotice(reason):
                self._post(t.AgentLeaving(host, reason))
            case messages.AgentWarning(text):
                self._warn_of(host, text)

    def _returned(self, report: messages.WorkerReport) -> None:
        """A worker that lived on while its agent was out of touch: what it would have said."""
        worker, stamp = report.worker, report.stamp
        self._pids[str(worker)] = report.pid
        self._post(t.Heartbeat(worker, stamp.place.name.lower(), stamp.generation, stamp.ticks, stamp.commit))
        for body in report.words:
            self._from_worker(worker, body)

    def _from_worker(self, worker: t.WorkerId, body: messages.FromWorkerBody) -> None:
        match body:
            case messages.Ready(generation, commit, previous, store, ticks, paused_s):
                self._goodput.ticks(generation, ticks)
                self._post(t.WorkerReady(worker, generation, commit, previous, store, ticks, paused_s))
            case messages.HoldAnswer(generation, ticks, in_gate):
                self._post(t.HoldAnswered(worker, generation, ticks, in_gate))
            case messages.Failure(generation, certain, error):
                self._post(t.FailureReported(worker, generation, certain, error))
            case messages.Gate(generation):
                self._post(t.GateEntered(worker, generation))
            case messages.First(generation):
                self._goodput.first_tick(generation, self._loop.time())
                self._post(t.FirstTick(worker, generation))
            case messages.Committed(commit):
                self._post(t.CommitSealed(worker, commit))
            case messages.Notice(number):
                self._post(t.WorkerLeaving(worker, f"{signal_name(number)} to the worker"))
            case messages.CommitSize(size):
                self._commit_bytes = max(self._commit_bytes, size)
            case messages.Synced(generation, size, seconds):
                self._event("sync", worker=str(worker), generation=generation, bytes=size, seconds=seconds)

    # ----------------------------------------------------------------------------------------------- what people see

    def _note(self, name: str, fields: dict[str, Any]) -> None:
        if name == "world_formed" or (name == "end" and fields["at"] == "now"):
            self._goodput.end(self._loop.time())
        elif name == "training_resumed":
            self._goodput.lost(fields["ticks_lost"])
        elif name == "agent_joined":
            fields["pid"] = self._agents.pid_of(fields["host"])
        elif name == "worker_exited":
            fields["pid"] = self._pids.pop(fields["worker"], None)
        self._report.event(name, fields)

    def _event(self, name: str, **fields: object) -> None:
        self._report.event(name, {"generation": self._m.generation, **fields})

    def _warn(self, text: str) -> None:
        self._event("warning", text=text)

    def _warn_of(self, host: str, text: str) -> None:
        """The same trouble on a thousand hosts is one trouble."""
        if text not in self._warned:
            self._warned.add(text)
            self._warn(f"host {host}: {text} (if it is the same on other hosts, that is not said again)")

    def _status(self) -> str:
        return status_text(self._job, self._m, self._reason, self._loop.time())

    def _say_threads(self) -> None:
        if self._threads():
            self._report.say("OMP_NUM_THREADS=1 for each worker, as several share this machine; set it to choose")

    def _close(self, started_at: float) -> int:
        now = self._loop.time()
        outcome = self._outcome
        assert outcome is not None
        share = self._goodput.share(now)
        fields = {
            "generation": self._m.generation,
            "status": "failed" if outcome.status else "succeeded",
            "generations": self._m.generation,
            "downtime_s": round(self._m.downtime_s, 6),
            "goodput": None if share is None else round(share, 4),
        }
        self._report.summary(fields, outcome.word, now - started_at)
        if outcome.root_cause is not None:
            self._report.root_cause(outcome.root_cause)
        self._report.close()
        return outcome.status

    # ------------------------------------------------------------------------------------------------------- the rest

    def _threads(self) -> bool:
        """Whether each worker gets one thread: several on one machine would fight over its cores (as torchrun does)."""
        return self._options.max_np != 1 and "OMP_NUM_THREADS" not in inherited_environment()

    def _job_spec(self) -> messages.JobSpec:
        options = self._options
        return messages.JobSpec(
            job=self._job,
            job_id=self._job_id,
            command=options.command,
            commit_dir=str(Path(options.commit_dir).absolute()),
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            hang_timeout_s=options.hang_timeout_s,
            start_timeout_s=options.start_timeout_s,
            stop_timeout_s=options.stop_timeout_s,
            driver_timeout_s=options.driver_timeout_s,
            tag_output=options.tag_output,
            log_dir=str(Path(options.log_dir).absolute()) if options.log_dir else None,
            environment=(("OMP_NUM_THREADS", "1"),) if self._threads() else (),
            preemption=messages.Preemption(
                options.preemption_signals,
                options.preemption_command,
                options.preemption_interval_s,
                options.preemption_timeout_s,
            ),
        )

    def _listen_to_signals(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
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
