"""Calls: the newest collective calls of the workers of one host. Few of them interest the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elasticstate.agent.worker_handle import WorkerHandle
from elasticstate.core.types import CallReport, WatchCalls, WorkerId
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
