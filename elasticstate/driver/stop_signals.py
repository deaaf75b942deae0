"""StopSignals: signals that end a job."""

from __future__ import annotations

import asyncio
import signal

from elasticstate.core import types as t
from elasticstate.driver.event_queue import EventQueue
from elasticstate.driver.job_state import JobState
from elasticstate.driver.report import Outcome, Report

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handler of SIGINT, SIGTERM and SIGHUP. The first signal stops the workers, the second one kills them.

    A world that trains has ``--stop-timeout``, in which its scripts may save and return: see core/running.py.
    """

    def __init__(self, state: JobState, queue: EventQueue, report: Report) -> None:
        self._state = state
        self._queue = queue
        self._report = report
        self.second = asyncio.Event()  # set by the second signal

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
                loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self._state.stopped is None and self._state.outcome is None:
            self.stop(number, number.name)
            return
        self.second.set()
        if self._state.outcome is None:
            self._state.outcome = self._state.stopped
            self._queue.wake()

    def stop(self, number: signal.Signals, by: str) -> None:
        """Stop the job as this signal does. ``by``: what asks for it."""
        self._report.log(f"{by}: stopping the workers. A second signal kills them at once.")
        self._state.stopped = Outcome(128 + number, f"was stopped by {by}")
        self._queue.post(t.StopRequested(by))
