"""Output that may fail, block, or be written in part, without any effect on the writing process.

A terminal that nobody reads, a full disk and a hanging file server are common, and must not stop a job. So each file
and each terminal has a thread of its own and a backlog of limited size.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from elasticstate.core.ids import WorkerId
from elasticstate.net.messages import OutputTrouble

BLOCKED_S = 2.0
"""Seconds after which a single write counts as blocked."""
_RETRY_INTERVAL_S = 0.25
_BACKLOG_BYTES = 1 << 20
_FILE_WRITE_BYTES = 64 * 1024
"""Limit of one write to a file. A terminal, which several processes share, gets PIPE_BUF, which is atomic (pipe(7))."""


class Writer:
    """Writer of one file or terminal, with a thread of its own.

    It keeps data that cannot be written yet, up to ``backlog_bytes``, and tries again. It drops and counts data beyond
    that. ``put`` and ``close`` may be called from any thread, and never block.
    """

    def __init__(self, target: int | Callable[[], int], backlog_bytes: int = _BACKLOG_BYTES) -> None:
        """``target``: an inherited descriptor, which stays open; or a function that opens one, called in the thread."""
        self._open = target if callable(target) else None
        self._fd = -1 if callable(target) else target
        self._backlog_bytes = backlog_bytes
        self._changed = threading.Condition()  # guards all attributes below
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._error = ""  # error of the last attempt
        self._began: float | None = None  # start of the write that is under way
        self.dropped_bytes = 0
        self._dropped_before = 0  # before the current trouble
        self._troubled_since: float | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, data: bytes) -> None:
        """Write the data after all earlier data, now or later; drop the data if the backlog is full."""
        if not data:
            return
        with self._changed:
            if self._is_closed or (self._queue and self._queued_bytes + len(data) > self._backlog_bytes):
                self.dropped_bytes += len(data)
                return
            self._queue.append(data)
            self._queued_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elasticstate-writer", daemon=True)
                self._thread.start()
            self._changed.notify()

    async def write(self, data: bytes, timeout_s: float | None = None) -> None:
        """Put the data as soon as it fits into the backlog: the caller waits for a slow output, but not for one that
        fails, or for a single write that lasts longer than ``timeout_s``."""
        try:
            await self._until(
                lambda: not self._queue or bool(self._error) or self._queued_bytes + len(data) <= self._backlog_bytes,
                timeout_s,
            )
        finally:  # also if cancelled
            self.put(data)

    async def flushed(self, timeout_s: float | None = None) -> None:
        """Wait until all data is written, or writing fails, or a single write lasts longer than ``timeout_s``.

        After ``close()``, the thread tries to write failed data once more and then drops it: wait for that, too.
        """
        await self._until(lambda: not self._queue or (bool(self._error) and not self._is_closed), timeout_s)

    def trouble(self) -> str:
        """Return the reason why data is not written or was dropped; "" if there is no trouble (any more)."""
        now = time.monotonic()
        with self._changed:
            is_blocked = self._began is not None and now - self._began > BLOCKED_S
            if self._error or is_blocked or self.dropped_bytes != self._dropped_before:
                self._troubled_since = self._troubled_since or now
            if self._troubled_since is None:
                return ""
            if not self._queue and not self._error and now - self._troubled_since > BLOCKED_S:
                self._troubled_since, self._dropped_before = None, self.dropped_bytes
                return ""
            return self._error or ("not read" if is_blocked else "read too slowly")

    @property
    def is_over(self) -> bool:
        """True if the writer is closed and its thread has ended."""
        with self._changed:
            return self._is_closed and (self._thread is None or not self._thread.is_alive())

    def close(self) -> None:
        """Let the thread write the remaining data as far as possible, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    async def _until(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                lasts_s = time.monotonic() - self._began if self._began is not None else 0.0
                if holds() or (timeout_s is not None and lasts_s >= timeout_s):
                    return
                woken: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, woken))
            await asyncio.wait({woken}, timeout=None if timeout_s is None else timeout_s - lasts_s)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for loop, woken in waiters:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_set, woken)

    def _run(self) -> None:
        while data := self._next():
            try:
                written, error = self._write(data), ""
            except OSError as failure:
                written, error = 0, failure.strerror or str(failure)
            self._note(written, error)
        if self._open is not None and self._fd >= 0:
            with suppress(OSError):  # an error of earlier writes on a file server: too late to try again
                os.close(self._fd)

    def _next(self) -> bytes:
        """Wait for data to write; return none at the end."""
        with self._changed:
            if self._error:
                self._changed.wait_for(lambda: self._is_closed, _RETRY_INTERVAL_S)
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if not self._queue:
                return b""
            self._began = time.monotonic()
            return self._queue[0]

    def _write(self, data: bytes) -> int:
        if self._open is not None:
            if self._fd < 0:
                self._fd = self._open()
            return os.write(self._fd, data[:_FILE_WRITE_BYTES])
        try:
            return os.write(self._fd, data[: select.PIPE_BUF])
        except BlockingIOError:  # another process has made the shared file description non-blocking
            poller = select.poll()
            poller.register(self._fd, select.POLLOUT)
            poller.poll()
            return 0

    def _note(self, written: int, error: str) -> None:
        with self._changed:
            self._began, self._error = None, error
            head = self._queue.popleft()
            if written < len(head):
                self._queue.appendleft(head[written:])
            self._queued_bytes -= written
            if error and self._is_closed:
                self.dropped_bytes += self._queued_bytes
                self._queue.clear()
                self._queued_bytes = 0
            self._wake()


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


@dataclass(slots=True)
class _Seen:
    reported: OutputTrouble
    reported_at: float = 0.0
    over_bytes: int = 0  # dropped by writers that are closed
    before_bytes: int = 0  # dropped before the present trouble


class Watch:
    """Reports on outputs that cannot be written: when a trouble begins, when it changes, and when it is over.

    Call ``look`` for each output, several times a second.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def forget(self) -> None:
        """Report each trouble that lasts once more."""
        for output, seen in self._seen.items():
            seen.reported = OutputTrouble(output, "", (), 0)

    def look(self, output: str, writers: list[Writer], waiting: Iterable[WorkerId] = ()) -> Iterator[OutputTrouble]:
        """Yield the state of an output with these ``writers`` if it has changed. Remove the writers that are closed.

        ``waiting``: the workers that wait for this output. A new count of dropped bytes alone is reported only now and
        then.
        """
        seen = self._seen.setdefault(output, _Seen(OutputTrouble(output, "", (), 0)))
        reason = next(filter(None, [writer.trouble() for writer in writers]), "")
        for writer in [writer for writer in writers if writer.is_over]:
            writers.remove(writer)
            seen.over_bytes += writer.dropped_bytes
        dropped_bytes = seen.over_bytes + sum(writer.dropped_bytes for writer in writers) - seen.before_bytes
        trouble = OutputTrouble(output, reason, tuple(waiting) if reason else (), dropped_bytes)
        is_change = (reason, trouble.workers) != (seen.reported.reason, seen.reported.workers)
        now = time.monotonic()
        if is_change or (reason and trouble != seen.reported and now - seen.reported_at > BLOCKED_S):
            seen.reported, seen.reported_at = trouble, now
            yield trouble
        if not reason:
            seen.before_bytes += dropped_bytes
