"""Periodic looks that begin at different times come together."""

from __future__ import annotations

import asyncio
from contextlib import closing

from elasticstate.threads import next_beat
from tests.kit.driver import Clock


def test_looks_come_at_multiples_of_their_interval_and_none_twice() -> None:
    found: dict[float, list[float]] = {0.5: [], 1.0: []}

    async def look(begin_s: float, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(begin_s)
        for _ in range(3):
            await next_beat(interval_s)
            found[interval_s].append(loop.time())

    async def looks() -> None:
        await asyncio.gather(look(0.1, 0.5), look(0.7, 1.0))

    with closing(Clock()) as clock:
        clock.run_until_complete(looks())
    assert found == {0.5: [0.5, 1.0, 1.5], 1.0: [2.0, 3.0, 4.0]}, "less than half a second is no look every second"
