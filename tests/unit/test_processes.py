"""Commands that are asked: nothing of one is left, whenever its caller gives up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from elasticstate.processes import ask


@pytest.mark.parametrize("turns", range(6))
def test_a_command_ends_with_its_caller_however_often_that_is_cancelled(tmp_path: Path, turns: int) -> None:
    """At the end of an event loop all tasks are cancelled, also those that were cancelled just before."""
    told = tmp_path / "pid"

    async def scenario() -> None:
        asking = asyncio.ensure_future(ask(f"sh -c 'echo $$ > {told}; exec sleep 100'", 60))
        while not (told.exists() and told.read_text().endswith("\n")):
            await asyncio.sleep(0.005)
            assert not asking.done()
        asking.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        assert not psutil.pid_exists(int(told.read_text())), "ended, and asked for its status"

    asyncio.run(asyncio.wait_for(scenario(), 20))
