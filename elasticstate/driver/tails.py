"""The last lines of workers' output, requested from their agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elasticstate.core.types import WorkerId
from elasticstate.net import messages


class Tails:
    """Requests for the last lines of workers. A request for a worker that is under way serves all who ask."""

    def __init__(self, send: Callable[[str, messages.ToAgent], None]) -> None:
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
