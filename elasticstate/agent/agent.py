"""The agent of one host: does what the driver says, tells what it sees, judges whether its workers are alive.

In and out of its phases::

    attach ──JobSpec──► serve ──Shutdown──► stop the workers, exit
                          │ the driver is gone
                          ▼
                        orphan ──driver_timeout, or no worker is left──► stop the workers, exit
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elasticstate._native import ControlPage
from elasticstate.agent.output import Terminal
from elasticstate.agent.pulse import Pulse, newest_commit
from elasticstate.agent.room import Room
from elasticstate.agent.worker_process import WorkerProcess, make_pumps
from elasticstate.commits import CommitDirectory, control_file, owner_of, remove_dead
from elasticstate.config import WorkerEnvironment, inherited_environment, version
from elasticstate.core.types import CommitId, WorkerId
from elasticstate.errors import CommitSpaceError
from elasticstate.net import messages
from elasticstate.net.link import AgentSocket
from elasticstate.net.rpc import DriverStream

LOOK_INTERVAL_S = 0.25  # between two looks at the workers' stamps
_ESCAPE_TIMEOUT_S = 2.0  # for a worker to get out of a collective, when its generation has ended
_STACKS_TIMEOUT_S = 0.5  # for the stacks of a worker that is to be killed
STAMPS_INTERVAL_S = 0.5  # between two messages with them: the agent's own sign of life


@dataclass(slots=True)
class _Seat:
    """A worker of this agent."""

    process: WorkerProcess
    pulse: Pulse
    error: str = ""  # the first that it reported
    waits: int = 0  # for answers of this agent
    doubted_at: float | None = None  # since when it is known that it may hang
    watcher: asyncio.Task[None] | None = None
    stopping: list[asyncio.TimerHandle] = field(default_factory=list)


class Agent:
    """``await Agent(launch).run()`` returns the exit status."""

    def __init__(self, launch: messages.Launch) -> None:
        self._launch = launch
        self._seats: dict[WorkerId, _Seat] = {}
        self._terminals = (Terminal(1), Terminal(2))
        self._held: int | None = None  # the generation that a hold of the driver stops
        self._empty = asyncio.Event()  # no worker is left
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        fcntl.flock(os.open(self._launch.job_directory, os.O_RDONLY), fcntl.LOCK_SH)  # until the end of this process
        hello = messages.AgentHello(self._launch.host, os.getpid(), messages.PROTOCOL_VERSION, version())
        self._driver = DriverStream(self._launch.address, self._launch.token, hello)
        self._listen_to_signals()
        self._socket = AgentSocket(self._launch.socket, self._admit, self._from_worker, self._complain)
        try:
            first = await self._driver.receive()
            if not isinstance(first, messages.JobSpec):
                raise ConnectionError(f"the driver says {first}")
            self._spec = first
            self._commits = CommitDirectory(
                first.commit_dir, first.job_id, self._launch.host, self._launch.job_directory
            )
            self._room = Room(self._commits, self._launch.host, lambda: len(self._seats), self._complain)
            self._socket.open()
        except (ConnectionError, OSError) as error:
            self._complain(f"cannot serve: {error}")
            return 1
        self._driver.send(messages.Serving(tuple(self._adopted())))
        self._loop.run_in_executor(None, remove_dead, first.commit_dir)  # gigabytes take a while
        looking = asyncio.ensure_future(self._look_regularly())
        status = await self._serve()
        looking.cancel()
        self._socket.close()
        self._room.close()
        self._commits.remove()
        await self._driver.flush()
        await self._driver.close()
        return status

    async def _serve(self) -> int:
        serving = asyncio.ensure_future(self._obey())
        self._watch_stdin(serving)
        try:
            reason = await serving
        except (ConnectionError, asyncio.CancelledError):
            self._release_hold()
            await self._orphaned()
            return 1
        await self._stop_all(reason)
        return 0

    async def _obey(self) -> str:
        """Carry out orders until the one to shut down; returns its reason. Raises ConnectionError without a driver."""
        while True:
            order = await self._driver.receive()
            if isinstance(order, messages.Shutdown):
                return order.reason
            self._carry_out(order)

    def _carry_out(self, order: messages.ToAgent) -> None:
        match order:
            case messages.Spawn(worker, reserve_bytes):
                self._spawn(worker, reserve_bytes)
            case messages.Stop(worker, _, kill):
                self._stop(worker, kill)
            case messages.ToWorkers(workers, body):
                self._note_hold(body)
                data = messages.encode_to_worker(body)
                for worker in list(self._seats) if workers is None else workers:
                    self._socket.send(worker, data)
                    if isinstance(body, messages.LeaveOrder):
                        self._kill_later(worker)
            case messages.WorldsOnHost(worlds):
                for worker, world in worlds:
                    self._socket.send(worker, messages.encode_to_worker(world))
            case _:
                self._complain(f"did not expect {type(order).__name__}")

    def _note_hold(self, body: messages.ToWorkerBody) -> None:
        match body:
            case messages.HoldOrder(generation):
                self._held = generation
            case messages.ReleaseOrder() | messages.EndOrder():
                self._held = None

    def _release_hold(self) -> None:
        """A hold must end without the driver; not after END, which the workers may be on their way to."""
        if self._held is not None:
            data = messages.encode_to_worker(messages.ReleaseOrder(self._held))
            for worker in self._seats:
                self._socket.send(worker, data)

    def _adopted(self) -> Iterator[tuple[int, CommitId]]:
        """What an agent before this one has left in memory."""
        for slot in self._commits.adopted():
            with suppress(OSError, ValueError):  # it died as it made the page
                page = ControlPage(control_file(self._commits.prefix(slot)))
                commit = newest_commit(page, owner_of(self._spec.job_id, self._launch.host, slot))
                if commit is not None:
                    yield slot, commit

    # ------------------------------------------------------------------------------------------------- the processes

    def _spawn(self, worker: WorkerId, reserve_bytes: int) -> None:
        spec, launch = self._spec, self._launch
        try:
            pulse = Pulse(self._commits.make_page(worker.slot), owner_of(spec.job_id, worker.host, worker.slot))
            pumps = make_pumps(worker, self._terminals, spec.tag_output, spec.log_dir)
            process = WorkerProcess(
                worker, spec.command, self._environment(worker, reserve_bytes), launch.directory, *pumps
            )
        except (OSError, CommitSpaceError) as error:
            self._complain(f"cannot start {worker}: {error}")
            self._driver.send(messages.Exited(worker, 0, 127, None, f"cannot be started: {error}"))
            return
        seat = self._seats[worker] = _Seat(process, pulse)
        self._empty.clear()
        self._driver.send(messages.Started(worker, process.pid))
        seat.watcher = asyncio.ensure_future(self._watch(seat))
        for index in (0, 1):
            if reserve_bytes:  # while it boots
                self._begin(self._room.make(worker.slot, index, reserve_bytes))

    def _environment(self, worker: WorkerId, reserve_bytes: int) -> Mapping[str, str]:
        given = dict(self._spec.environment)
        told = WorkerEnvironment(
            socket=self._launch.socket,
            worker=worker,
            job=self._spec.job,
            job_id=self._spec.job_id,
            local_address=self._launch.local_address,
            commits=self._commits.prefix(worker.slot),
            reserve_bytes=reserve_bytes,
        )
        # torch's own words on a peer's death are a page of C++ frames each; the worker's exception tells the same.
        quiet = {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        return {**quiet, **inherited_environment(), **given, **told.variables()}

    async def _watch(self, seat: _Seat) -> None:
        process = seat.process
        ending = await process.ended()
        self._socket.drain(process.worker)
        seat.pulse.look(self._loop.time())
        self._send_stamps()  # its last words on its commits come before its end
        for timer in seat.stopping:
            timer.cancel()
        del self._seats[process.worker]
        self._socket.disconnect(process.worker)
        error = seat.error or (ending.last_words if ending.exit_code != 0 else "")
        exited = messages.Exited(process.worker, process.pid, ending.exit_code, ending.signal, error)
        self._driver.send(exited)
        if not self._seats:
            self._empty.set()

    def _stop(self, worker: WorkerId, kill: bool) -> None:
        """Ask a worker that has said hello, SIGTERM to any other; SIGKILL to the session when the time is up."""
        seat = self._seats.get(worker)
        if seat is None:
            return
        if kill:
            seat.process.kill()
        elif self._socket.is_connected(worker):
            self._socket.send(worker, messages.encode_to_worker(messages.LeaveOrder()))
        else:
            seat.process.terminate()
        self._kill_later(worker)

    def _kill_later(self, worker: WorkerId) -> None:
        seat = self._seats.get(worker)
        if seat is not None:
            seat.stopping.append(self._loop.call_later(self._spec.stop_timeout_s, seat.process.kill))

    async def _stop_all(self, reason: str) -> None:
        for worker in list(self._seats):
            self._stop(worker, kill=False)
        while self._seats:
            await self._empty.wait()

    async def _orphaned(self) -> None:
        """Training goes on without a driver, for a while."""
        limit_s = self._spec.driver_timeout_s
        if self._seats:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), limit_s)
        if self._seats:
            self._complain(f"no driver for --driver-timeout of {limit_s:g} s: stops its workers")
        await self._stop_all("the driver is gone")
        shutil.rmtree(self._launch.job_directory, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------- the workers

    def _admit(self, worker: WorkerId) -> str:
        return "" if worker in self._seats else "is no worker of this agent"

    def _from_worker(self, worker: WorkerId, message: messages.FromWorkerBody) -> None:
        seat, now = self._seats[worker], self._loop.time()
        match message:
            case messages.Hello():
                seat.pulse.begin(now)
            case messages.ErrorReport():
                seat.error = seat.error or message.error
            case messages.NeedSpace(index, size):
                self._begin(self._make_room(seat, index, size))
            case _:
                self._driver.send(messages.FromWorker(worker, message))

    def _begin(self, what: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make_room(self, seat: _Seat, index: int, size_bytes: int) -> None:
        seat.waits += 1
        worker = seat.process.worker
        try:
            length, error = await self._room.make(worker.slot, min(index, 1), size_bytes)
        finally:
            seat.waits -= 1
        self._socket.send(worker, messages.encode_to_worker(messages.Space(index, length, error)))

    async def _look_regularly(self) -> None:
        looked_at = stamped_at = self._loop.time()
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            now = self._loop.time()
            stalled_s = now - looked_at - LOOK_INTERVAL_S
            if stalled_s > self._spec.heartbeat_timeout_s / 2:
                self._forgive(stalled_s)
            looked_at = now
            self._judge(now)
            if now - stamped_at >= STAMPS_INTERVAL_S:
                stamped_at = now
                self._send_stamps()

    def _forgive(self, stalled_s: float) -> None:
        """This agent itself was stopped, and its workers may have been, too: that time does not count."""
        for seat in self._seats.values():
            seat.pulse.forgive(stalled_s)

    def _judge(self, now: float) -> None:
        for seat in self._seats.values():
            seat.pulse.look(now)
            if seat.waits:
                seat.pulse.move(now)
            reason = seat.pulse.verdict(now, self._spec.heartbeat_timeout_s) or self._hangs(seat, now)
            if reason:
                seat.pulse.end()  # once
                self._driver.send(messages.Unresponsive(seat.process.worker, reason))
                self._begin(self._kill_with_stacks(seat))

    def _hangs(self, seat: _Seat, now: float) -> str:
        """Why a worker is taken to hang, or "".

        Whoever waits for it in a collective stands as still as the one that hangs. So the generation is ended first,
        which gets all others out of there: who does not move then is the one.
        """
        doubt = seat.pulse.doubt(now, self._spec.hang_timeout_s)
        if not doubt:
            seat.doubted_at = None
        elif seat.doubted_at is None:
            seat.doubted_at = now
            failure = messages.Failure(seat.pulse.generation, True, doubt)
            self._driver.send(messages.FromWorker(seat.process.worker, failure))
        elif now - seat.doubted_at > _ESCAPE_TIMEOUT_S:
            return doubt
        return ""

    async def _kill_with_stacks(self, seat: _Seat) -> None:
        """First its stacks into its log: the handler needs no GIL, but the process must not be stopped."""
        seat.process.ask_for_stacks()
        await asyncio.sleep(_STACKS_TIMEOUT_S)
        seat.process.kill()

    def _send_stamps(self) -> None:
        stamps = [(worker, seat.pulse.news()) for worker, seat in self._seats.items()]
        self._driver.send(messages.Stamps(tuple((worker, stamp) for worker, stamp in stamps if stamp is not None)))

    # ------------------------------------------------------------------------------------------------- the outer world

    def _listen_to_signals(self) -> None:
        """Ctrl-C and a closed terminal are the driver's to judge. No SIG_IGN: the workers would inherit it."""
        for number in (signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, lambda: None)
        self._loop.add_signal_handler(signal.SIGTERM, lambda: self._driver.send(messages.AgentNotice()))

    def _watch_stdin(self, serving: asyncio.Task[str]) -> None:
        """The driver holds the other end of our stdin for as long as it lives."""

        def ended() -> None:
            if not os.read(0, 4096):
                self._loop.remove_reader(0)
                serving.cancel()

        self._loop.add_reader(0, ended)

    def _complain(self, text: str) -> None:
        print(f"elasticstate: agent of {self._launch.host}: {text}", file=sys.stderr, flush=True)
