"""EventQueue: urgent events wake the main loop, others wait for more, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest import mock

from elasticstate.core import types as t
from elasticstate.driver.driver import EventQueue

SOON_S = 30.0
READY = t.FromWorker(t.WorkerId("a", 0, 1), t.Ready(1, None, None, "a:1", paused_s=1.0))
URGENT, LATER = t.HostDraining("a", "urgent"), t.HostDraining("b", "later")


def play(scenario: Callable[[EventQueue], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(scenario(EventQueue()), SOON_S)

    asyncio.run(run())


def test_an_urgent_event_ends_the_wait_with_all_events_in_their_order() -> None:
    async def scenario(queue: EventQueue) -> None:
        queue.post_later([LATER], workers=1_000_000)
        queue.post(URGENT)
        await queue.wait(None)
        assert queue.take() == [LATER, URGENT]
        assert queue.take() == []

    play(scenario)


def test_events_that_can_wait_end_the_wait_later() -> None:
    async def scenario(queue: EventQueue) -> None:
        queue.post_later([LATER], workers=1)
        queue.post_later([LATER], workers=1)
        await queue.wait(None)
        assert queue.take() == [LATER, LATER]

    play(scenario)


def test_a_deadline_in_the_past_ends_the_wait() -> None:
    async def scenario(queue: EventQueue) -> None:
        await queue.wait(0.0)
        assert queue.events == []

    play(scenario)


def test_a_call_of_wake_before_the_wait_is_not_lost() -> None:
    async def scenario(queue: EventQueue) -> None:
        queue.wake()
        await queue.wait(None)

    play(scenario)


def test_the_pause_of_a_ready_worker_goes_on_while_the_event_waits() -> None:
    """A driver that reattaches waits for all agents before it passes their events to the core."""

    async def scenario(queue: EventQueue) -> None:
        with mock.patch.object(asyncio.get_running_loop(), "time", side_effect=[100.0, 103.0, 105.0]):
            queue.post(URGENT)
            queue.post(READY)
            queue.post(READY)
            waited = queue.take()
        assert [
            event.body.paused_s
            for event in waited
            if isinstance(event, t.FromWorker) and isinstance(event.body, t.Ready)
        ] == [6.0, 3.0]
        assert waited[0] == URGENT
        queue.post(URGENT)
        assert queue.take() == [URGENT]

    play(scenario)
