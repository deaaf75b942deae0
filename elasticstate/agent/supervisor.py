"""Supervision of the workers of one host: liveness, hangs, the lease, and the stamps that the driver gets."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from elasticstate._native import ControlPage
from elasticstate.agent.host_use import INTERVAL_S as USE_INTERVAL_S, Meter
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import CallReport, CommitsCompared, CopyFigures, DigestQuestion, WatchCalls
from elasticstate.net import messages
from elasticstate.net.messages import HostUse, Place, Stamp
from elasticstate.processes import reads_stdin
from elasticstate.threads import in_thread

if TYPE_CHECKING:
    from elasticstate.agent.host_job import HostJob
    from elasticstate.agent.workers import WorkerHandle

_STAMPS_INTERVAL_S = 1.0
_STAMPS_PER_TIMEOUT = 10
_FEWEST_STAMPS_PER_TIMEOUT = 4
_STAMPS_PER_S = 4000  # limit of stamps that the driver receives
_MOST_VALUES = 10_000  # of scripts, in one message


Seal = tuple[int, int, int, int, int, bytes]
"""Generation, tick, length of the header, length and checksum of the content, and tag, as the page has them."""


class Liveness:
    """One worker's control page, and when it last changed. Times are passed in, from the agent's monotonic clock.

    A worker is judged from ``begin`` (its Hello) to ``end``. The page may be read, at any time.
    """

    def __init__(self, page: ControlPage, owner: bytes) -> None:
        """Reset the page before the process starts. Only the seals of the previous worker's commits stay."""
        self._page = self._seals = page
        self._page.reset()
        self._owner = owner
        self._judged = False
        self._heartbeat_at = self._moved_at = self._looked_at = 0.0
        self._seen = self._page.stamp()
        self._trains_since = 0
        self._has_changed = False
        self._reported: Stamp | None = None
        self._next_point = 0  # number of the first point on the page that was not reported
        self._lease_until_ns = 0

    def begin(self, now: float) -> None:
        """Start to judge the worker: its Hello has arrived."""
        self._judged = True
        self._heartbeat_at = self._moved_at = self._looked_at = now

    def storage_is(self, page: ControlPage) -> None:
        """Read seals from the page of the worker's new storage; stamps only if its Hello has not arrived yet."""
        self._seals = page
        if not self._judged:
            self._page = page
            page.set_lease(self._lease_until_ns)

    def end(self) -> None:
        """Stop judging the worker."""
        self._judged = False

    def look(self, now: float) -> None:
        """Read the page."""
        last, self._seen, self._looked_at = self._seen, self._page.stamp(), now
        self._trains_since = self._page.trains_since
        if self._seen[0] != last[0]:  # heartbeat
            self._heartbeat_at, self._has_changed = now, True
        if self._seen[1:] != last[1:]:
            self._moved_at = now

    def move(self, now: float) -> None:
        """Count the worker as making progress: it waits for this agent, or for a person."""
        self._moved_at = now

    def set_lease(self, until_ns: int) -> None:
        """Write the end of the lease to the page."""
        self._lease_until_ns = until_ns
        self._page.set_lease(until_ns)

    def ask(self, generation: int, question: DigestQuestion) -> None:
        """Ask the worker about its commits in a generation. It answers at its next tick."""
        self._page.ask(generation, question.tick, question.begin << 32 | question.end)

    def judge(self, verdict: CommitsCompared) -> None:
        """Write a verdict on the worker's commits."""
        self._page.judge(verdict.generation, verdict.equal, verdict.compared)

    def set_alone(self, alone: bool) -> None:
        """Write whether the agent is without a driver, so that no verdict comes."""
        self._page.set_alone(alone)

    def forgive(self, seconds: float) -> None:
        """Do not count this time."""
        self._heartbeat_at += seconds
        self._moved_at += seconds

    def verdict(self, now: float, heartbeat_timeout_s: float) -> str:
        """Return why the worker must be given up, or "". A worker that is past the exit gate is not judged."""
        if not self._judged or self._place == Place.DONE or now - self._heartbeat_at <= heartbeat_timeout_s:
            return ""
        return f"no heartbeat for --heartbeat-timeout of {heartbeat_timeout_s:g} s"

    def doubt(self, now: float, hang_timeout_s: float | None) -> str:
        """Return why the worker may hang, or "". It may just as well wait for another worker that hangs."""
        if hang_timeout_s is None or not self._judged or self._place != Place.TRAIN:
            return ""
        return f"no tick for --hang-timeout of {hang_timeout_s:g} s" if now - self._moved_at > hang_timeout_s else ""

    def holds_commit(self, index: int) -> bool:
        """Return True if buffer 0 or 1 carries a seal."""
        return self._seals.sealed(index, self._owner) is not None

    @property
    def generation(self) -> int:
        return self._seen[3]

    @property
    def _place(self) -> Place:
        return _place(self._seen[2])

    @property
    def commits(self) -> tuple[CommitId, ...]:
        """The commits in the buffers, the newest first."""
        return tuple(commit for commit in sealed_commits(self._seals, self._owner) if commit is not None)

    @property
    def latest(self) -> Stamp:
        """The stamp as last read from the page."""
        _, _, place, generation, ticks = self._seen
        newest, previous = sealed_commits(self._seals, self._owner)
        return Stamp(_place(place), generation, ticks, newest, self._page.commit_s, previous=previous)

    def changed_stamp(self) -> Stamp | None:
        """Return the stamp if there was a heartbeat, or any change of the stamp, since the last call; else None."""
        stamp = self.latest
        if not self._has_changed and stamp == self._reported:
            return None
        self._has_changed, self._reported = False, stamp
        still_s = self._looked_at - self._moved_at
        trained_s = self._looked_at - self._trains_since / 1e9 if self._trains_since else 0.0
        points, self._next_point = self._page.points(self._next_point)
        pace = tuple((tick, own_us) for generation, tick, own_us in points if generation == stamp.generation)
        seconds = {"still_s": round(max(0.0, still_s), 3), "trained_s": round(max(0.0, trained_s), 3)}
        return replace(stamp, pace=pace, **seconds)


def stamps_interval_s(heartbeat_timeout_s: float, workers: int) -> float:
    """Return the interval between an agent's Stamps messages, which are the agent's own heartbeats.

    The interval grows with the number of workers, so that the driver keeps up.
    """
    interval_s = min(_STAMPS_INTERVAL_S, heartbeat_timeout_s / _STAMPS_PER_TIMEOUT)
    return min(interval_s * max(1.0, workers / _STAMPS_PER_S), heartbeat_timeout_s / _FEWEST_STAMPS_PER_TIMEOUT)


def sealed_commits(page: ControlPage, owner: bytes) -> tuple[CommitId | None, CommitId | None]:
    """Return the newest commit and the previous commit whose seals are on the page."""
    commits = [CommitId(*seal[:2]) for seal in seals_of(page, owner).values()]
    return commits[-1] if commits else None, commits[0] if len(commits) > 1 else None


def seals_of(page: ControlPage, owner: bytes) -> dict[int, Seal]:
    """Return the seals on the page by the index of their buffers, the newest last."""
    seals = {index: seal for index in (0, 1) if (seal := page.sealed(index, owner)) is not None}
    return dict(sorted(seals.items(), key=lambda found: found[1][:2]))


def _place(number: int) -> Place:
    """Convert the number on the page. A worker that corrupts its own memory may have written an invalid one."""
    try:
        return Place(number)
    except ValueError:
        return Place.BOOT


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
            waited_s = None if handle.call_is_known else handle.waited_s(now)
            if self._limit_s is not None and waited_s is not None and waited_s >= self._limit_s:
                self._forward(handle, now)

    def watch(self, order: WatchCalls, now: float) -> None:
        """Carry out the driver's order."""
        self._watched = order.generation if order.on else 0
        for handle in self._handles.values() if order.on else ():
            if handle.call is not None and handle.call.generation == order.generation:
                self._forward(handle, now)

    def _forward(self, handle: WorkerHandle, now: float) -> None:
        report = handle.call_report(now)
        assert report is not None
        handle.call_is_known = report.waiting_s is not None
        self._send(messages.FromWorker(handle.process.worker, report))


def _stamp(handle: WorkerHandle) -> Stamp | None:
    """Return what has changed of a worker since the last stamp, with its new digests; None: nothing has."""
    stamp = handle.liveness.changed_stamp()
    if stamp is None or not handle.digests:
        return stamp
    digests = (d for message in handle.digests if message.generation == stamp.generation for d in message.digests)
    stamp = replace(stamp, digests=tuple(digests))
    handle.digests.clear()
    return stamp


class Lease:
    """The time for which the workers of this host may make ticks without an answer from the driver.

    The term counts from the agent's request, on the agent's own clock: however late the answer arrives, the driver
    waits longer than the lease lasts (docs/decisions/unreachable-hosts.md). ``until_ns`` is a time of CLOCK_BOOTTIME;
    0: no limit.
    """

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
        self._use: HostUse | None = None  # measured, and not sent yet
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
                for handle in self._handles.values():
                    handle.liveness.forgive(stalled_s)  # this agent was stopped: its workers may have been, too
            elif self._options.standbys is not None or not self._job.launch.job_directory:
                # else, on the driver's machine, silence only means a stopped driver, which nobody replaces
                self._driver.judge(now, self._options.heartbeat_timeout_s)
            looked_at = now
            self._judge(now)
            self.calls.look(now)
            for trouble in self._job.outputs.changes():
                self._driver.send(trouble)
            if now - stamped_at >= stamps_interval_s(timeout_s, self.world_size):
                stamped_at = now
                self.send_stamps()

    def _judge(self, now: float) -> None:
        for handle in self._handles.values():
            handle.liveness.look(now)
            if handle.waits or (handle.has_stdin and reads_stdin(handle.process.pid)):
                handle.liveness.move(now)
            reason = handle.liveness.verdict(now, self._options.heartbeat_timeout_s) or self._hangs(handle, now)
            if reason:
                handle.liveness.end()  # report only once
                self._driver.send(messages.WorkerUnresponsive(handle.process.worker, reason))
                self._job.begin(self._kill_with_stacks(handle))

    def _hangs(self, handle: WorkerHandle, now: float) -> str:
        """Return why a worker is considered hung, or "". The generation is ended first, which gets the others out of
        their collective: a worker that makes no progress for another ``failure_grace_s`` is the one that hangs."""
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
        stamps = tuple((worker, stamp) for worker, handle in self._handles.items() if (stamp := _stamp(handle)))
        number = self.lease.ask() if self._options.lease_s is not None else 0
        use, self._use = self._use, None
        self._driver.send(messages.Stamps(stamps, number, self.copy_figures(), tuple(self._metrics()), use))

    def _metrics(self) -> Iterator[tuple[WorkerId, tuple[tuple[str, float], ...]]]:
        """Yield the new values that scripts have reported. Those beyond the size of a message follow with the next."""
        left = _MOST_VALUES
        for worker, handle in self._handles.items():
            values = handle.metrics
            if not values or left <= 0:
                continue
            handle.metrics = {}
            left -= len(values)
            if self._job.is_watched:
                yield worker, tuple(values.items())

    async def measure_use(self) -> None:
        """Measure the use of this host regularly, until cancelled. A GPU that does not answer delays nothing else."""
        meter = Meter()
        while True:
            if self._job.is_watched:
                with suppress(OSError):
                    self._use = await in_thread(meter.measure)
            await asyncio.sleep(USE_INTERVAL_S)

    def renew_lease(self, number: int) -> None:
        self.lease.granted(number, self._options.lease_s or 0.0)
        for handle in self._handles.values():
            handle.liveness.set_lease(self.lease.until_ns)
