"""Common beats of the driver's periodic looks: those that come together wake up the process only once."""

from __future__ import annotations

import asyncio


async def next_beat(interval_s: float) -> None:
    """Sleep until the event loop's clock is at a multiple of the interval: at least half of it, so that no look comes
    twice."""
    wait_s = interval_s - asyncio.get_running_loop().time() % interval_s
    await asyncio.sleep(wait_s if wait_s >= interval_s / 2 else wait_s + interval_s)
