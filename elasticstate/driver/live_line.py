"""The live line at the bottom of the terminal: the state of a job in numbers, twice a second."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from elasticstate.core.accounting import figures_of, ticks_of
from elasticstate.core.hangs import no_tick_text
from elasticstate.core.state import Running, Together, living_members
from elasticstate.core.step import Membership
from elasticstate.core.texts import number_of
from elasticstate.driver.job import JobState
from elasticstate.screen.screen import Screen
from elasticstate.terminal import printable
from elasticstate.threads import in_thread

_INTERVAL_S = 0.5
_RATE_LOOKS = 5  # heartbeats come once per second: the rate is that of about five seconds
_NO_TICKS_S = 3.0  # after this time without ticks the rate falls


class LiveLine:
    """Sender of the live line. ``screen`` None: there is no line."""

    def __init__(self, screen: Screen | None, state: JobState) -> None:
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
        """Stop this process, as Ctrl-Z asks for, and leave a clean terminal. The job continues."""
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
        return [*still, *parts] if goodput is None else [*still, *parts, f"goodput {goodput:.1%}"]

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
