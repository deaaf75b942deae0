"""EventQueue: events on their way to the core."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from elasticstate.core import types as t

_DELAY_PER_WORKER_S = 1e-4  # delay of events that are not urgent
_LONGEST_DELAY_S = 1.0


class EventQueue:
    """Events that the core has not received yet. The main loop waits until it is time to pass them to the core."""

    def __init__(self) -> None:
        self._events: list[t.Event] = []
        self._ready_at: dict[int, float] = {}  # when a READY arrived, by its index
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # for events that can wait

    @property
    def events(self) -> Sequence[t.Event]:
        return self._events

    def post(self, event: t.Event) -> None:
        """Add an event that the core must receive at once."""
        if isinstance(event, t.WorkerReady):
            self._ready_at[len(self._events)] = asyncio.get_running_loop().time()
        self._events.append(event)
        self.wake()

    def post_later(self, events: Iterable[t.Event], workers: int) -> None:
        """Add events that can wait, so that the core receives several at once.

        A step of the core takes time for each of the job's ``workers``.
        """
        self._events += events
        if self._timer is None:
            delay_s = min(_LONGEST_DELAY_S, _DELAY_PER_WORKER_S * workers)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.wake)

    def wake(self) -> None:
        """End the present or next call of ``wait``."""
        self._is_due.set()

    async def wait(self, deadline: float | None) -> None:
        """Wait for events, a call of ``wake``, or the deadline on the event loop's clock."""
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self.wake)
        await self._is_due.wait()
        self._is_due.clear()
        if timer is not None:
            timer.cancel()

    def take(self) -> list[t.Event]:
        """Remove all events, and return them in their order. READY names the present length of the worker's pause.

        A driver that reattaches waits for its agents, for a limited time, before it takes their first events.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._events = self._events, []
        ready_at, self._ready_at = self._ready_at, {}
        now = asyncio.get_running_loop().time()
        for index, at in ready_at.items():
            ready = events[index]
            assert isinstance(ready, t.WorkerReady)
            events[index] = replace(ready, paused_s=ready.paused_s + now - at)
        return events
