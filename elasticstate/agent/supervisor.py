"""Supervision of the workers of one host: liveness, hangs, the lease, and the stamps that the driver gets."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping

from elasticstate.agent.host_job import HostJob
from elasticstate.agent.worker import WorkerHandle, stamps_interval_s
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import CallReport, CopyFigures, WatchCalls
from elasticstate.net import messages


class Calls:
    """Filter of the workers' reports of their calls.

    The driver receives reports of workers that have waited for --stall-check-time, with the end of these waits. While
    it watches a generation, it receives all reports of that generation.
    """

    def __init__(
        self,
        handles: Mapping[WorkerId, WorkerHandle],
        limit_s: float | None,
        send: Callable[[messages.FromAgent], None],
    ) -> None:
        """``limit_s``: --stall-check-time; None: off."""
        self._handles = handles
        self._limit_s = limit_s
        self._send = send
        self._watched = 0  # generation whose calls the driver watches; 0: none

    def received(self, handle: WorkerHandle, report: CallReport, now: float) -> None:
        """Record a worker's report, and forward it if the driver watches, or knows of a wait that this report ends."""
        if self._limit_s is None:
            return
        handle.call, handle.call_at = report, now
        if handle.call_is_known or report.generation == self._watched:
            self._forward(handle, now)

    def look(self, now: float) -> None:
        """Forward the reports of workers that have waited for too long."""
        for handle in self._handles.values():
            if handle.call is not None and not handle.call_is_known and self._is_overdue(handle, now):
                self._forward(handle, now)

    def watch(self, order: WatchCalls, now: float) -> None:
        """Carry out the driver's order."""
        self._watched = order.generation if order.on else 0
        for handle in self._handles.values() if order.on else ():
            if handle.call is not None and handle.call.generation == order.generation:
                self._forward(handle, now)

    def _is_overdue(self, handle: WorkerHandle, now: float) -> bool:
        waited_s = handle.waited_s(now)
        return self._limit_s is not None and waited_s is not None and waited_s >= self._limit_s

    def _forward(self, handle: WorkerHandle, now: float) -> None:
        report = handle.call_report(now)
        assert report is not None
        handle.call_is_known = report.waiting_s is not None
        self._send(messages.FromWorker(handle.process.worker, report))


# ---------------------------------------------------------------------------------------------------------------- lease
# The lease: the time for which the workers of a host may make ticks without an answer from the driver.
#
# The term counts from the agent's request, on the agent's own clock. The driver counts from when it has declared this
# host unreachable. So however late the answer arrives, the driver waits longer than the lease lasts (C. Gray and D.
# Cheriton, "Leases", SOSP 1989).


class Lease:
    """Lease of one host. ``until_ns`` is a time of CLOCK_BOOTTIME; 0: no limit."""

    def __init__(self) -> None:
        self.until_ns = 0
        self._asked: deque[tuple[int, int]] = deque(maxlen=1024)  # number and time of each request
        self._number = 0

    def ask(self) -> int:
        """Return the number of a request that is sent now."""
        self._number += 1
        self._asked.append((self._number, time.clock_gettime_ns(time.CLOCK_BOOTTIME)))
        return self._number

    def granted(self, number: int, term_s: float) -> None:
        """Extend the lease: the driver has received this request."""
        while self._asked and self._asked[0][0] <= number:
            asked, at_ns = self._asked.popleft()
            if asked == number:
                self.until_ns = max(self.until_ns, at_ns + int(term_s * 1e9))


LOOK_INTERVAL_S = 0.25
"""Seconds between two looks at the workers' stamps."""
_STACKS_TIMEOUT_S = 0.5  # for the stacks of a worker that is to be killed


class Supervisor:
    """Judge of the workers of one host, by their control pages."""

    def __init__(self, job: HostJob) -> None:
        self._job = job
        self._handles = job.handles
        self._options = job.options
        self._driver = job.driver
        self.world_size = 0  # size of the newest world
        self.lease = Lease()
        self.copy_figures: Callable[[], CopyFigures] = CopyFigures
        self.calls = Calls(job.handles, job.options.stall_check_s, job.driver.send)

    async def run(self) -> None:
        """Look at the workers' control pages regularly, until cancelled."""
        looked_at = stamped_at = asyncio.get_running_loop().time()
        timeout_s = self._options.heartbeat_timeout_s
        look_interval_s = min(LOOK_INTERVAL_S, stamps_interval_s(timeout_s, 0))
        while True:
            await asyncio.sleep(look_interval_s)
            now = asyncio.get_running_loop().time()
            stalled_s = now - looked_at - look_interval_s
            if stalled_s > self._options.heartbeat_timeout_s / 2:
                self._forgive(stalled_s)
            elif not self._job.launch.job_directory:  # on the driver's machine, silence only means a stopped driver
                self._driver.judge(now, self._options.heartbeat_timeout_s)
            looked_at = now
            self._judge(now)
            self.calls.look(now)
            for trouble in self._job.outputs.changes():
                self._driver.send(trouble)
            if now - stamped_at >= stamps_interval_s(timeout_s, self.world_size):
                stamped_at = now
                self.send_stamps()

    def _forgive(self, stalled_s: float) -> None:
        """Do not count time in which this agent itself was stopped: its workers may have been stopped, too."""
        for handle in self._handles.values():
            handle.liveness.forgive(stalled_s)

    def _judge(self, now: float) -> None:
        for handle in self._handles.values():
            handle.liveness.look(now)
            if handle.waits:
                handle.liveness.move(now)
            reason = handle.liveness.verdict(now, self._options.heartbeat_timeout_s) or self._hangs(handle, now)
            if reason:
                handle.liveness.end()  # report only once
                self._driver.send(messages.WorkerUnresponsive(handle.process.worker, reason))
                self._job.begin(self._kill_with_stacks(handle))

    def _hangs(self, handle: WorkerHandle, now: float) -> str:
        """Return why a worker is considered hung, or "".

        All members of a collective stop when one of them hangs. So the generation is ended first, which gets the others
        out of the collective. A worker that makes no progress for another ``failure_grace_s`` is the one that
        hangs.
        """
        doubt = handle.liveness.doubt(now, self._options.hang_timeout_s)
        if not doubt:
            handle.doubted_at = None
        elif handle.doubted_at is None:
            handle.doubted_at = now
            failure = messages.GenerationFailure(handle.liveness.generation, True, doubt, hang=True)
            self._driver.send(messages.FromWorker(handle.process.worker, failure))
        elif now - handle.doubted_at > self._options.failure_grace_s:
            return doubt
        return ""

    async def _kill_with_stacks(self, handle: WorkerHandle) -> None:
        """Let the worker write its stacks to its log, then kill it.

        The signal handler needs no GIL, but the process must not be stopped.
        """
        handle.process.ask_for_stacks()
        await asyncio.sleep(_STACKS_TIMEOUT_S)
        handle.process.kill()

    def send_stamps(self) -> None:
        changed = [(worker, handle.liveness.changed_stamp()) for worker, handle in self._handles.items()]
        stamps = tuple((worker, stamp) for worker, stamp in changed if stamp is not None)
        number = self.lease.ask() if self._options.lease_s is not None else 0
        self._driver.send(messages.Stamps(stamps, number, self.copy_figures()))

    def renew_lease(self, number: int) -> None:
        self.lease.granted(number, self._options.lease_s or 0.0)
        for handle in self._handles.values():
            handle.liveness.set_lease(self.lease.until_ns)
