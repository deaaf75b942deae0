"""Outputs of a job that cannot be written: terminals, log files, the event file. Logged, and shown in the status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from elasticstate.core.texts import listed, number_of
from elasticstate.driver.beats import next_beat
from elasticstate.driver.report import Report
from elasticstate.net.messages import OutputTrouble
from elasticstate.net.output_watch import Watch

_LOOK_INTERVAL_S = 0.5


class OutputTroubles:
    """The troubles of all outputs: the agents report theirs, the driver checks its own."""

    def __init__(self, report: Report, event: Callable[..., None]) -> None:
        """``event(name, **fields)`` writes an event, and adds the common fields."""
        self._report = report
        self._event = event
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
        place = {"host": host, "output": trouble.output}
        if not trouble.reason:
            self._event("output_resumed", **place, dropped_bytes=trouble.dropped_bytes)
            if last is not None:
                self._log_end(host, last, trouble.dropped_bytes)
            return
        is_known = self._has(trouble)
        self._troubles[host, trouble.output] = trouble, since
        if last is None or (last.reason, last.workers) != (trouble.reason, trouble.workers):
            workers = [str(worker) for worker in trouble.workers]
            self._event("output_blocked", **place, reason=trouble.reason, workers=workers)
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
