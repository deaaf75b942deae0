"""The driver's output besides its report: counted lines, libraries' messages, troubles, tails, and the live line."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast

from elasticstate.core import event_file, links
from elasticstate.core.accounting import figures_of, ticks_of
from elasticstate.core.health import no_tick_text
from elasticstate.core.ids import WorkerId
from elasticstate.core.state import Membership, Running, Together, living_members
from elasticstate.core.types import listed, number_of
from elasticstate.driver.job import JobState
from elasticstate.driver.report import Journal, Report
from elasticstate.driver.screen import Screen
from elasticstate.net import messages
from elasticstate.net.messages import OutputTrouble
from elasticstate.processes import reads_stdin
from elasticstate.terminal import printable
from elasticstate.threads import in_thread, next_beat
from elasticstate.writing import Watch, Writer

_MOST_SINGLE = 5  # of one kind, each with a line of its own
_MOST_KINDS = 32  # the lines of all further kinds are counted together
_FURTHER = ""


class CountedLines:
    """After a few lines of one kind, only each doubling of their number is written."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._counts: dict[str, int] = {}

    def put(self, kind: str, text: str) -> None:
        """Write a line of this kind, or only count it."""
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _FURTHER
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= _MOST_SINGLE or count & (count - 1) == 0:
            times = f" ({count} times so far)" if count > _MOST_SINGLE else ""
            self._write(f"{text}{times}")

    def refused(self, peer: str, reason: str) -> None:
        """Report a connection that was refused."""
        self.put(reason, f"refused a connection from {peer}: {reason}")


# ------------------------------------------------------------------------------------------------------- library output
# Messages of libraries in the driver's process (asyncio, aiohttp and warnings write to ``sys.stderr``), written by the
# thread that may block instead of the event loop.


_LONGEST_TEXT = 500  # characters
_MOST_TRACES = 10  # one for each kind of errors
_MOST_FRAMES = 12  # the innermost ones


@contextmanager
def captured(terminal: Writer, warn: Callable[[str], None]) -> Iterator[None]:
    """Until the end, send text for ``sys.stderr`` to ``terminal``, and log records as counted lines to ``warn``.

    Call this on the event loop, where ``warn`` is called, too.
    """
    handler, before = _Handler(warn), sys.stderr
    logging.getLogger().addHandler(handler)
    sys.stderr = io.TextIOWrapper(
        cast("io.BufferedWriter", _Stderr(terminal)), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    try:
        yield
    finally:
        sys.stderr = before
        logging.getLogger().removeHandler(handler)


class _Stderr(io.RawIOBase):
    """The bytes of ``sys.stderr``, which never block their writer."""

    def __init__(self, terminal: Writer) -> None:
        self._terminal = terminal

    def write(self, data: Any) -> int:
        self._terminal.put(bytes(data))
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return os.isatty(2)


class _Handler(logging.Handler):
    """Writer of log records, from any thread: one line each, and the traceback of the first error of a kind."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._lines = CountedLines(warn)
        self._traced: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a message that cannot be formatted; or the loop is closed
            error, text = record.exc_info[1] if record.exc_info else None, _one_line(record.getMessage())
            if error is not None:
                text += f" ({type(error).__name__}: {_one_line(str(error))})"
            kind = f"{record.name} {str(record.msg).partition(chr(10))[0]} {type(error).__name__}"
            self._loop.call_soon_threadsafe(self._put, kind, f"{record.name}: {text}", error)

    def _put(self, kind: str, text: str, error: BaseException | None) -> None:
        if error is not None and kind not in self._traced and len(self._traced) < _MOST_TRACES:
            self._traced.add(kind)
            lines = traceback.format_exception(type(error), error, error.__traceback__, -_MOST_FRAMES)
            text = "".join([text, "\n", *lines])
        self._lines.put(kind, text)


def _one_line(text: str) -> str:
    return " ".join(text[:_LONGEST_TEXT].split())


_LOOK_INTERVAL_S = 0.5


class OutputTroubles:
    """The troubles of all outputs: the agents report theirs, the driver checks its own."""

    def __init__(self, report: Report, journal: Journal) -> None:
        self._report = report
        self._journal = journal
        self._troubles: dict[tuple[str | None, str], tuple[OutputTrouble, float]] = {}  # by host and output; since when
        self._unreported_bytes: dict[
            tuple[str, str], int
        ] = {}  # dropped on hosts that have recovered, while others have not

    @asynccontextmanager
    async def watched(self, patience_s: float) -> AsyncIterator[None]:
        """Watch this driver's own outputs. At the end wait until all is written, or blocked for ``patience_s``."""
        watching = asyncio.ensure_future(self._look())
        try:
            yield
        finally:
            watching.cancel()
            await self._report.close(patience_s)

    async def _look(self) -> None:
        watch = Watch()
        while True:
            for output, writers in self._report.writers.items():
                for trouble in watch.look(output, writers):
                    self.update(None, trouble)
            await next_beat(_LOOK_INTERVAL_S)

    def update(self, host: str | None, trouble: OutputTrouble) -> None:
        """Handle a change in the state of an output. ``host`` None: an output of this driver."""
        last, since = self._troubles.pop((host, trouble.output), (None, time.monotonic()))
        if not trouble.reason:
            self._journal.event(
                event_file.OutputResumed, host=host, output=trouble.output, dropped_bytes=trouble.dropped_bytes
            )
            if last is not None:
                self._log_end(host, last, trouble.dropped_bytes)
            return
        is_known = self._has(trouble)
        self._troubles[host, trouble.output] = trouble, since
        if last is None or (last.reason, last.workers) != (trouble.reason, trouble.workers):
            workers = [str(worker) for worker in trouble.workers]
            self._journal.event(
                event_file.OutputBlocked, host=host, output=trouble.output, reason=trouble.reason, workers=workers
            )
        if not is_known if last is None else trouble.workers and not last.workers:
            self._report.log(f"warning: {_place(host)}{trouble.output}: {trouble.reason}; {_consequence(trouble)}")

    def forget(self, host: str) -> None:
        """Forget the troubles of a host that is lost, or has a new agent."""
        for key in [key for key in self._troubles if key[0] == host]:
            del self._troubles[key]

    def lines(self) -> Iterator[str]:
        """Yield the lines for the status."""
        now = time.monotonic()
        for (host, output), (trouble, since) in self._troubles.items():
            yield (
                f"{_place(host)}{output}: {trouble.reason}, for {now - since:.1f} s; "
                f"{number_of(trouble.dropped_bytes, 'byte')} dropped; {_consequence(trouble)}"
            )

    def _has(self, like: OutputTrouble) -> bool:
        """Return True if another output has the same trouble: a full file server counts once for a thousand hosts."""
        return any((t.output, t.reason) == (like.output, like.reason) for t, _ in self._troubles.values())

    def _log_end(self, host: str | None, last: OutputTrouble, dropped_bytes: int) -> None:
        kind = last.output, last.reason
        dropped_bytes += self._unreported_bytes.pop(kind, 0)
        if self._has(last):
            self._unreported_bytes[kind] = dropped_bytes
            return
        dropped = number_of(dropped_bytes, "byte")
        self._report.log(f"{_place(host)}{last.output} can be written again; dropped {dropped}")


def _place(host: str | None) -> str:
    return "elasticrun: " if host is None else f"host {host}: "


def _consequence(trouble: OutputTrouble) -> str:
    if trouble.workers:
        remedy = "" if trouble.output.startswith("--") else ". With --log-dir, no worker waits for the terminal"
        workers = listed((str(worker.slot_id) for worker in trouble.workers), shown=8)
        return f"waiting workers: {workers}{remedy}"
    return "output above a limit is dropped"


class Tails:
    """Requests for the last lines of workers. A request for a worker that is under way serves all who ask."""

    def __init__(self, send: Callable[[str, messages.ToAgent], object]) -> None:
        self._send = send
        self._awaited: dict[WorkerId, asyncio.Future[messages.OutputTail]] = {}

    async def of(self, worker: WorkerId, timeout_s: float) -> messages.OutputTail | None:
        """Return the last lines of a worker; None if its agent does not answer in time."""
        awaited = self._awaited.get(worker)
        if awaited is None:
            awaited = self._awaited[worker] = asyncio.get_running_loop().create_future()
            self._send(worker.host, messages.FetchOutput(worker))
        try:
            return await asyncio.wait_for(asyncio.shield(awaited), timeout_s)
        except asyncio.TimeoutError:
            if self._awaited.get(worker) is awaited:
                del self._awaited[worker]
            return None

    def received(self, tail: messages.OutputTail) -> None:
        awaited = self._awaited.pop(tail.worker, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(tail)


_INTERVAL_S = 0.5
_RATE_LOOKS = 5  # heartbeats come once per second: the rate is that of about five seconds
_NO_TICKS_S = 3.0  # after this time without ticks the rate falls


class LiveLine:
    """Sender of the live line. ``screen`` None: there is no line."""

    def __init__(self, screen: Screen | None, state: JobState, log: Callable[[str], None]) -> None:
        self._log = log
        self._screen = screen
        self._state = state
        self._looks: deque[tuple[float, int]] = deque(maxlen=_RATE_LOOKS + 1)
        self._resized = asyncio.Event()

    @asynccontextmanager
    async def shown(self, has_other_writers: bool) -> AsyncIterator[None]:
        """Show the line. ``has_other_writers``: processes that do not write through the screen use the terminal."""
        if self._screen is None or has_other_writers:
            yield
            return
        loop, screen = asyncio.get_running_loop(), self._screen
        handles_stop = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if handles_stop:
            loop.add_signal_handler(signal.SIGTSTP, self._stop, screen)
        loop.add_signal_handler(signal.SIGWINCH, self._resized.set)
        showing = asyncio.ensure_future(self._show(screen))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            screen.show(())
            loop.remove_signal_handler(signal.SIGWINCH)
            if handles_stop:
                loop.remove_signal_handler(signal.SIGTSTP)

    async def _show(self, screen: Screen) -> None:
        loop = asyncio.get_running_loop()
        while True:
            parts = await in_thread(self._parts, self._state.membership, loop.time()) if _has_keys(screen) else []
            screen.show(parts)
            self._resized.clear()
            waiting = asyncio.ensure_future(self._resized.wait())
            try:
                await asyncio.wait({waiting}, timeout=_INTERVAL_S)
            finally:
                waiting.cancel()

    def _stop(self, screen: Screen) -> None:
        """Stop this process, as Ctrl-Z asks for, and leave a clean terminal. The job continues.

        Not while a worker reads the terminal: it and the shell would share the keys.
        """
        if os.isatty(0) and reads_stdin(os.getpid(), os.fstat(0).st_rdev):
            self._log("no stop while a worker reads the terminal. Use another terminal, or Ctrl-C to end the job")
            return
        screen.hide()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)  # goes on here after SIGCONT
        asyncio.get_running_loop().add_signal_handler(signal.SIGTSTP, self._stop, screen)

    def _parts(self, m: Membership, now: float) -> list[str]:
        """Return the parts of the line, the most important first. Called in a thread."""
        if not self._state.reason:
            return []
        if not isinstance(m.phase, (Running, Together)):
            since = getattr(m.phase, "since", None)
            phase = m.phase_name.partition("(")[0].lower()
            reason = printable(self._state.reason).replace("\n", " ")
            still = filter(None, (no_tick_text(m, now),))
            return [*still, f"{phase} for {now - since:.0f} s" if since is not None else phase, reason]
        members = living_members(m)
        hosts = len({worker.id.host for worker in members})
        parts = [f"generation {m.generation}", f"{number_of(len(members), 'worker')} on {number_of(hosts, 'host')}"]
        ticks = ticks_of(m)
        if ticks:
            parts += [f"tick {ticks:,}", *self._rate(ticks, now)]
        if self._state.committed_at is not None:
            parts.append(f"commit {max(0.0, now - self._state.committed_at):.1f} s ago")
        goodput = figures_of(m, now).goodput
        still = filter(None, (no_tick_text(m, now),))
        cut = links.lines(m, now)[:1]
        return [*still, *cut, *parts] if goodput is None else [*still, *cut, *parts, f"goodput {goodput:.1%}"]

    def _rate(self, ticks: int, now: float) -> list[str]:
        """Return the ticks per second between the reports of the last seconds, if there are two."""
        looks = self._looks
        if not looks or looks[-1][1] != ticks:
            looks.append((now, ticks))
        (since, before), (until, _) = looks[0], looks[-1]
        if now - until > _NO_TICKS_S:
            until = now
        return [f"{(ticks - before) / (until - since):.1f} ticks/s"] if until > since else []


def _has_keys(screen: Screen) -> bool:
    """Return True unless the shell has put this process into the background, and shows its prompt."""
    try:
        return os.tcgetpgrp(screen.terminal) == os.getpgrp()
    except OSError:  # the terminal of another session, which has no shell with jobs
        return True
