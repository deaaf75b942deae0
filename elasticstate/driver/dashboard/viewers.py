"""The viewers of a dashboard. Each gets the whole view once, and then only changes.

After an event of the job the changes are sent at once, but not sooner than INTERVAL_S after the last ones. Without an
event only ticks and times change: these are sent every QUIET_INTERVAL_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from math import ceil, inf

import msgspec

from elasticstate.driver.dashboard.merge_patch import View, difference

INTERVAL_S = 1.0
QUIET_INTERVAL_S = 2.0
_MOST_WAITING = 8  # messages that a slow viewer may have to receive yet; then it must connect again


class Viewers:
    """The viewers who watch now. Without them no view is made."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._last: View = {}
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.TimerHandle | None = None
        self._published_at = -inf

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one viewer, until the job is over or the viewer is too slow."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        if not self._queues or self._loop.time() >= self._published_at + INTERVAL_S:
            self.publish()  # else others have got this view a moment ago
        queue.put_nowait(_event("view", self._last))
        self._queues.add(queue)
        self._publish_at(self._quiet_until)
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.discard(queue)

    def news(self) -> None:
        """Send the changes soon: there is an event of the job."""
        if self._queues:
            self._publish_at(self._published_at + INTERVAL_S)

    def publish(self) -> None:
        """Send the changes since the last call to all viewers. A viewer without changes gets a sign of life."""
        view = self._view()
        message = _event("patch", difference(self._last, view)) if self._queues else b""
        self._last, self._published_at = view, self._loop.time()
        for queue in list(self._queues):
            if queue.full():
                self._dismiss(queue)
            else:
                queue.put_nowait(message)

    def close(self) -> None:
        """Send the last view, and end all streams."""
        if self._next is not None:
            self._next.cancel()
        if self._queues:
            self.publish()
        for queue in list(self._queues):
            if not queue.full():
                queue.put_nowait(_event("over", {}))
            self._dismiss(queue)

    def _dismiss(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queues.discard(queue)
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(None)

    @property
    def _quiet_until(self) -> float:
        """Return the time of the next changes without an event, together with other looks of the driver (beats.py)."""
        return ceil(2 * (self._published_at + QUIET_INTERVAL_S)) / 2

    def _publish_at(self, at: float) -> None:
        """Publish at this time of the event loop's clock, or sooner if that is planned already."""
        if self._next is not None:
            if self._next.when() <= at:
                return
            self._next.cancel()
        self._next = self._loop.call_at(at, self._publish_regularly)

    def _publish_regularly(self) -> None:
        self._next = None
        if self._queues:
            self.publish()
            self._publish_at(self._quiet_until)


def _event(kind: str, content: View) -> bytes:
    """Return a server-sent event. JSON has no line breaks, so the data is one line."""
    data = msgspec.json.encode({"now": round(time.time(), 3), "content": content})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
