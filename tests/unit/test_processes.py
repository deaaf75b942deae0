"""Processes: commands run by ``ask`` leave no process, whenever their caller gives up; what a process does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticstate.processes import CommandTimedOut, ask, is_at_work


@pytest.mark.parametrize("turns", range(6))
def test_a_command_ends_with_its_caller_however_often_that_is_cancelled(tmp_path: Path, turns: int) -> None:
    """The end of an event loop cancels all tasks, including tasks that were cancelled just before."""
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


def test_all_of_a_session_ends_with_a_command_that_takes_too_long(tmp_path: Path) -> None:
    """mpirun gives each rank a process group of its own, as a shell with job control does."""
    told = tmp_path / "pid"
    script = tmp_path / "script"
    script.write_text(f"set -m\nsleep 100 &\necho $! > {told}\necho begun\nwait\n")

    async def scenario() -> None:
        with pytest.raises(CommandTimedOut, match=r"timed out after 2 s") as caught:
            await ask(f"sh {script}", 2, whole_session=True)
        assert caught.value.answer.stdout == "begun\n"
        child = int(told.read_text())
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_process_that_computes_is_at_work_and_a_stopped_or_dead_one_is_not() -> None:
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 10
        while not is_at_work(program.pid):
            assert time.monotonic() < deadline, "it does not compute"
        program.send_signal(signal.SIGSTOP)
        while is_at_work(program.pid):
            assert time.monotonic() < deadline, "it does not stop"
    finally:
        program.kill()
        program.wait()
    assert not is_at_work(program.pid)
