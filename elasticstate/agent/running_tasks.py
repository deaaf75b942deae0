"""RunningTasks: tasks of an agent that nothing waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class RunningTasks:
    """Owner of running tasks. asyncio itself keeps only weak references to tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
