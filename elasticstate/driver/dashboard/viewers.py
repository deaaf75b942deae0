"""The viewers of a dashboard. Each gets the whole view once, and then only changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from elasticstate.driver.dashboard.merge_patch import View, difference

INTERVAL_S = 1.0
_MOST_WAITING = 8  # messages that a slow viewer may have to receive yet; then it must connect again
MOST_VIEWERS = 32


class Viewers:
    """The viewers who watch now. Without them no view is made."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._last: View = {}
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._publishing: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        return len(self._queues) >= MOST_VIEWERS

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one viewer, until the job is over or the viewer is too slow."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        self.publish()
        queue.put_nowait(_event("view", self._last))
        self._queues.add(queue)
        if self._publishing is None:
            self._publishing = asyncio.ensure_future(self._publish_regularly())
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.discard(queue)

    def publish(self) -> None:
        """Send the changes since the last call to all viewers. A viewer without changes gets a sign of life."""
        view = self._view()
        message = _event("patch", difference(self._last, view)) if self._queues else b""
        self._last = view
        for queue in list(self._queues):
            if queue.full():
                self._dismiss(queue)
            else:
                queue.put_nowait(message)

    async def close(self) -> None:
        """Send the last view, and end all streams."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait({self._publishing})
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

    async def _publish_regularly(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            if not self._queues:
                break
            self.publish()
        self._publishing = None


def _event(kind: str, content: View) -> bytes:
    """Return a server-sent event. JSON has no line breaks, so the data is one line."""
    data = msgspec.json.encode({"now": round(time.time(), 3), "content": content})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
