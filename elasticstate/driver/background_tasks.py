"""Background tasks whose unexpected errors end the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundTasks:
    """Tasks of one owner. ``wake`` is called when one has failed; then ``check`` raises its error."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._tasks: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._wake()

    def check(self) -> None:
        """Raise the error of a task: a driver that no longer watches its agents must not continue."""
        if self._error is not None:
            raise self._error
