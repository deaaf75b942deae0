"""The agent of one host: does what the driver says, tells what it sees, judges whether its workers are alive.

In and out of its phases::

    attach ──JobSpec──► serve ──Shutdown──► stop the workers, exit
                          │ ▲ the driver is gone; it is there again
                          ▼ │
                        orphan ──driver_timeout──► stop the workers, exit
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticstate import error_file
from elasticstate.agent.account import Account
from elasticstate.agent.claim import claim
from elasticstate.agent.contact import Contact
from elasticstate.agent.identities import Identities
from elasticstate.agent.lease import Lease
from elasticstate.agent.leftovers import tend
from elasticstate.agent.output import Audience, Terminal
from elasticstate.agent.post_mortem import cause_of_death, count_oom_kills
from elasticstate.agent.preemption import Preemption
from elasticstate.agent.pulse import Pulse, stamps_interval_s
from elasticstate.agent.result import part_of_result
from elasticstate.agent.room import Room
from elasticstate.agent.seat import Seat
from elasticstate.agent.worker_process import WorkerProcess, environment_of_worker, make_pumps
from elasticstate.commits import (
    ID_FILE,
    make_agent_directory,
    owner_of,
    remove_job_directory,
    result_file,
)
from elasticstate.config import WorkerEnvironment, runtime_directory
from elasticstate.core.types import WorkerId
from elasticstate.errors import CommitSpaceError
from elasticstate.net import messages, orders
from elasticstate.net.control import SILENT_SHARE
from elasticstate.net.launch import Launch
from elasticstate.net.link import AgentSocket

LOOK_INTERVAL_S = 0.25  # between two looks at the workers' stamps
_STACKS_TIMEOUT_S = 0.5  # for the stacks of a worker that is to be killed
_GONE = "the driver is gone"


class Agent:
    """``await Agent(launch).run()`` returns the exit status."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._seats: dict[WorkerId, Seat] = {}
        self._terminals = (Terminal(1), Terminal(2))
        self._empty = asyncio.Event()  # no worker is left
        self._empty.set()
        self._world_size = 0  # of the newest world
        self._lease = Lease()
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self) -> int:
        self._loop, launch = asyncio.get_running_loop(), self._launch
        self._listen_to_signals()
        self._preemption = Preemption(lambda message: self._driver.send(message))
        try:
            job_directory = launch.job_directory or make_agent_directory(str(runtime_directory()))
            self._lock = os.open(job_directory, os.O_RDONLY)  # until the end of this process
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except OSError as error:
            self._complain(f"cannot serve: {error}")
            return 1
        self._socket_path = launch.socket or f"{job_directory}/agent"
        self._socket = AgentSocket(self._socket_path, self._admit, self._from_worker, self._complain)
        status, looking = 1, None
        try:
            self._driver = Contact(launch)
            self._identities = Identities(launch.host, launch.connect_timeout_s, self._driver, self._complain)
            spec = self._spec = await self._driver.establish(launch.wait_s)
            if not launch.job_directory:
                Path(job_directory, ID_FILE).write_text(spec.job_id)
            if not Path(launch.directory).is_dir():
                raise NotADirectoryError(f"{launch.directory}, in which the job was started, is not there")
            self._local_address = launch.local_address or self._driver.local_address
            looking = asyncio.ensure_future(self._look_regularly())
            self._commits = await claim(spec, launch.host, job_directory, self._socket_path, self._driver)
            if spec.call:
                self._commits.keep_call(spec.call)
            self._account = Account(self._commits, spec.job_id, launch.host)
            self._room = Room(self._commits, launch.host, lambda: len(self._seats), self._complain)
            self._socket.open()
        except (ConnectionError, OSError, ValueError) as error:
            self._complain(f"cannot serve: {error}")
        else:
            status = await self._live()
        if looking is not None:
            looking.cancel()
        if not launch.job_directory:
            shutil.rmtree(job_directory, ignore_errors=True)
        return status

    async def _live(self) -> int:
        """Serve until the end, and clear up; returns the exit status."""
        self._driver.send(self._account.serving({}, self._loop.time()))
        self._preemption.begin(self._spec.preemption, self._launch, self._socket_path)
        tending = asyncio.ensure_future(tend(self._commits, self._spec.driver_timeout_s))
        status = await self._serve()
        tending.cancel()
        await self._preemption.close()
        self._socket.close()
        self._room.close()
        self._identities.close()
        self._commits.remove()
        await self._driver.close()
        return status

    async def _serve(self) -> int:
        """Until the driver says that it is enough, or is gone for too long."""
        reason = ""
        while not reason:
            try:
                await self._stop_all(await self._obey())
            except ConnectionError as error:  # noqa: PERF203
                self._complain(f"out of touch with the driver: {error}")
                self._release_hold()
                reason = await self._orphaned()
            else:
                return 0
        await self._stop_all(reason)
        if reason == _GONE and self._launch.job_directory:
            remove_job_directory(self._launch.job_directory, self._lock)
        return 1

    async def _obey(self) -> str:
        """Carry out orders until the one to shut down; returns its reason. Raises ConnectionError without a driver."""
        while True:
            order = await self._driver.receive()
            if isinstance(order, messages.Shutdown):
                return order.reason
            self._carry_out(order)

    async def _orphaned(self) -> str:
        """Training goes on without a driver until there is one (""), or there is a reason to stop. Who has no workers
        waits as well: what is in memory here, or how they ended, may be what the next driver has to know."""
        limit_s = self._spec.driver_timeout_s
        try:
            await self._driver.establish(limit_s)
        except ConnectionRefusedError as refusal:
            self._complain(f"stops its workers: {refusal}")
            return str(refusal)
        except ConnectionError as error:
            self._complain(f"no driver for --driver-timeout of {limit_s:g} s: stops its workers ({error})")
            return _GONE
        self._driver.send(self._account.serving(self._seats, self._loop.time()))
        self._preemption.tell()
        self._send_stamps()  # before there is a new world the lease is renewed
        return ""

    def _carry_out(self, order: messages.ToAgent) -> None:
        match order:
            case messages.Spawn(worker, reserve_bytes):
                self._spawn(worker, reserve_bytes)
            case messages.Stop(worker, _, kill):
                self._stop(worker, kill)
            case messages.ToWorkers(workers, body):
                self._account.told(body)
                data = orders.encode_to_worker(body)
                for worker in list(self._seats) if workers is None else workers:
                    self._socket.send(worker, data)
                    if isinstance(body, messages.LeaveOrder):
                        self._kill_later(worker)
            case messages.WorldsOnHost(worlds):
                self._account.has_a_world()
                for worker, world in worlds:
                    self._world_size = world.size
                    if worker in self._seats:
                        self._seats[worker].joined = world.generation
                        self._seats[worker].audience.rank = world.placement.rank
                        self._seats[worker].words.clear()
                    self._socket.send(worker, orders.encode_to_worker(world))
            case messages.Identity():
                self._begin(self._identities.hand_on(order))
            case messages.Heard(number):
                self._renew_lease(number)
            case messages.Fetch(slot, offset):
                self._driver.send(part_of_result(result_file(self._commits.prefix(slot)), slot, offset))
            case _:
                self._complain(f"did not expect {type(order).__name__}")

    def _release_hold(self) -> None:
        """A hold must end without the driver; not after END, which the workers may be on their way to."""
        if self._account.held is not None:
            data = orders.encode_to_worker(messages.ReleaseOrder(self._account.held))
            for worker in self._seats:
                self._socket.send(worker, data)

    # ------------------------------------------------------------------------------------------------- the processes

    def _spawn(self, worker: WorkerId, reserve_bytes: int) -> None:
        spec, launch = self._spec, self._launch
        self._account.started(worker)
        try:
            pulse = Pulse(self._commits.make_page(worker.slot), owner_of(spec.job_id, worker.host, worker.slot))
            audience = Audience(spec.output.only_ranks)
            pumps = make_pumps(worker, self._terminals, spec.output, audience)
            told = WorkerEnvironment(
                socket=self._socket_path,
                worker=worker,
                job=spec.job,
                job_id=spec.job_id,
                local_address=self._local_address,
                commits=self._commits.prefix(worker.slot),
                reserve_bytes=reserve_bytes,
                notice_signals=spec.preemption.signals,
                backend=spec.backend,
            )
            for path in (told.error_file, result_file(told.commits)):
                error_file.forget(path)
            environment = environment_of_worker(launch.environment, spec.environment, told)
            process = WorkerProcess(worker, spec.command, environment, launch.directory, *pumps)
        except (OSError, CommitSpaceError) as error:
            self._complain(f"cannot start {worker}: {error}")
            self._has_ended(messages.Exited(worker, 0, 127, None, f"cannot be started: {error}"))
            return
        pulse.set_lease(self._lease.until_ns)
        seat = self._seats[worker] = Seat(process, pulse, audience, told.error_file, count_oom_kills())
        self._empty.clear()
        self._driver.send(messages.Started(worker, process.pid))
        seat.watcher = asyncio.ensure_future(self._watch(seat))
        for index in (0, 1):
            if reserve_bytes:  # while it boots
                self._begin(self._room.make(worker.slot, index, reserve_bytes))

    async def _watch(self, seat: Seat) -> None:
        process = seat.process
        ending = await process.ended()
        self._socket.drain(process.worker)
        seat.pulse.look(self._loop.time())
        self._send_stamps()  # its last words on its commits come before its end
        for timer in seat.stopping:
            timer.cancel()
        del self._seats[process.worker]
        self._socket.disconnect(process.worker)
        error, time_ns = cause_of_death(ending, seat.error_file, count_oom_kills(), seat.oom_kills)
        exited = messages.Exited(process.worker, process.pid, ending.exit_code, ending.signal, error, time_ns)
        self._has_ended(exited)
        if not self._seats:
            self._empty.set()

    def _has_ended(self, exited: messages.Exited) -> None:
        self._account.ended(exited)
        self._driver.send(exited)

    def _stop(self, worker: WorkerId, kill: bool) -> None:
        """Ask a worker that has said hello, SIGTERM to any other; SIGKILL to the session when the time is up."""
        seat = self._seats.get(worker)
        if seat is None:
            return
        if kill:
            seat.process.kill()
        elif self._socket.is_connected(worker):
            self._socket.send(worker, orders.encode_to_worker(messages.LeaveOrder()))
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

    # --------------------------------------------------------------------------------------------------- the workers

    def _admit(self, worker: WorkerId) -> str:
        return "" if worker in self._seats else "is no worker of this agent"

    def _from_worker(self, worker: WorkerId, message: messages.FromWorkerBody) -> None:
        seat, now = self._seats[worker], self._loop.time()
        match message:
            case messages.Hello():
                seat.pulse.begin(now)
            case messages.NeedSpace(index, size):
                self._begin(self._make_room(seat, index, size))
            case _:
                if isinstance(message, messages.Notice):
                    seat.notice = message
                elif isinstance(message, messages.LASTING):
                    seat.words.append(message)
                self._driver.send(messages.FromWorker(worker, message))

    def _begin(self, what: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make_room(self, seat: Seat, index: int, size_bytes: int) -> None:
        seat.waits += 1
        worker = seat.process.worker
        try:
            length, error = await self._room.make(worker.slot, min(index, 1), size_bytes)
        finally:
            seat.waits -= 1
        self._socket.send(worker, orders.encode_to_worker(messages.Space(index, length, error)))

    async def _look_regularly(self) -> None:
        looked_at = stamped_at = self._loop.time()
        timeout_s = self._spec.heartbeat_timeout_s
        look_interval_s = min(LOOK_INTERVAL_S, stamps_interval_s(timeout_s, 0))
        while True:
            await asyncio.sleep(look_interval_s)
            now = self._loop.time()
            stalled_s = now - looked_at - look_interval_s
            if stalled_s > self._spec.heartbeat_timeout_s / 2:
                self._forgive(stalled_s)
            elif not self._launch.job_directory:  # on one machine silence only says that the driver is stopped
                self._driver.judge(now, SILENT_SHARE * self._spec.heartbeat_timeout_s)
            looked_at = now
            self._judge(now)
            if now - stamped_at >= stamps_interval_s(timeout_s, self._world_size):
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

    def _hangs(self, seat: Seat, now: float) -> str:
        """Why a worker is taken to hang, or "".

        Whoever waits for it in a collective stands as still as the one that hangs. So the generation is ended first,
        which gets all others out of there: who does not move then, for --failure-grace, is the one.
        """
        doubt = seat.pulse.doubt(now, self._spec.hang_timeout_s)
        if not doubt:
            seat.doubted_at = None
        elif seat.doubted_at is None:
            seat.doubted_at = now
            failure = messages.Failure(seat.pulse.generation, True, doubt)
            self._driver.send(messages.FromWorker(seat.process.worker, failure))
        elif now - seat.doubted_at > self._spec.failure_grace_s:
            return doubt
        return ""

    async def _kill_with_stacks(self, seat: Seat) -> None:
        """First its stacks into its log: the handler needs no GIL, but the process must not be stopped."""
        seat.process.ask_for_stacks()
        await asyncio.sleep(_STACKS_TIMEOUT_S)
        seat.process.kill()

    def _send_stamps(self) -> None:
        news = [(worker, seat.pulse.news()) for worker, seat in self._seats.items()]
        stamps = tuple((worker, stamp) for worker, stamp in news if stamp is not None)
        number = self._lease.ask() if self._spec.lease_s is not None else 0
        self._driver.send(messages.Stamps(stamps, number))

    def _renew_lease(self, number: int) -> None:
        self._lease.granted(number, self._spec.lease_s or 0.0)
        for seat in self._seats.values():
            seat.pulse.set_lease(self._lease.until_ns)

    # ------------------------------------------------------------------------------------------------- the outer world

    def _listen_to_signals(self) -> None:
        """Ctrl-C and a closed terminal are the driver's to judge. No SIG_IGN: the workers would inherit it."""
        for number in (signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, lambda: None)

    def _complain(self, text: str) -> None:
        with suppress(OSError):  # whoever has started it may be gone
            print(f"elasticstate: agent of {self._launch.host}: {text}", file=sys.stderr, flush=True)
