"""Processes: commands run by ``ask`` leave no process, whenever their caller gives up; what a process does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticstate.processes import (
    CLEANUP_S,
    CommandTimedOut,
    ask,
    is_at_work,
    kill_session,
    remedy_for,
    session_members,
)


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


NAMES = """
import multiprocessing, sys, time
from multiprocessing import shared_memory

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    lock, memory = context.Lock(), shared_memory.SharedMemory(create=True, size=4096)
    child = context.Process(target=time.sleep, args=(100,))
    child.start()
    print(f"sem{lock._semlock.name}".replace("/", "."), memory.name, flush=True)  # with fork, the semaphore has no name
    child.join()
"""


class Program:
    """A program with a child, a semaphore and shared memory, in a session of its own."""

    def __init__(self, directory: Path, method: str) -> None:
        script = directory / "script.py"
        script.write_text(NAMES)
        command = [sys.executable, str(script), method]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
        assert self.process.stdout is not None
        names = self.process.stdout.readline().split()
        self.files = [Path("/dev/shm", name) for name in names if name != "semNone"]
        assert [file for file in self.files if file.exists()] == self.files
        assert len(self.files) == (1 if method == "fork" else 2)

    def end(self) -> None:
        kill_session(self.process.pid, CLEANUP_S)
        self.process.communicate()


@pytest.mark.parametrize("is_killed_before", [True, False])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_shared_memory_and_semaphores_of_a_killed_session_are_removed_and_no_others(
    tmp_path: Path, method: str, is_killed_before: bool
) -> None:
    program, other = Program(tmp_path, method), Program(tmp_path, method)
    try:
        if is_killed_before:
            program.process.kill()
        program.end()
        assert not session_members(program.process.pid)
        assert not [file for file in program.files if file.exists()]
        assert [file for file in other.files if file.exists()] == other.files
    finally:
        other.end()


def test_a_resource_tracker_that_does_not_end_is_killed() -> None:
    """A process outside of the session may hold its pipe for ever."""
    words = [sys.executable, "-c", "import time; time.sleep(100)  # from multiprocessing.resource_tracker import main"]
    with subprocess.Popen(words, start_new_session=True) as program:
        kill_session(program.pid, 0.5)
        assert program.wait() == -signal.SIGKILL


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


WINDOWS = "Its lines end as on Windows. Remove the carriage returns:"


@pytest.mark.parametrize(
    ("text", "mode", "program", "remedy"),
    [
        ("#!/bin/sh\n", 0o644, "./p", "Make the file executable: chmod +x ./p"),
        ("#!/bin/sh\r\n", 0o755, "./p", f"{WINDOWS} sed -i 's/\\r$//' ./p"),
        ("#!/no/such/python -u\n", 0o755, "./p", "Its first line names /no/such/python, which is not there."),
        ("#!/bin/sh\n", 0o755, "p", "For the file in this directory, write ./p."),
        ("#!/bin/sh\n", 0o755, "./p", ""),
        ("#!/bin/sh\n", 0o755, "./q", ""),
    ],
)
def test_a_file_that_does_not_run_has_a_remedy(tmp_path: Path, text: str, mode: int, program: str, remedy: str) -> None:
    (tmp_path / "p").write_text(text, newline="")
    (tmp_path / "p").chmod(mode)
    assert remedy_for(program, str(tmp_path)) == remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_file_with_the_right_mode_that_may_not_run_is_not_advised_to_change_it(tmp_path: Path) -> None:
    program = "import sys; from elasticstate.processes import remedy_for; print(remedy_for('./p', sys.argv[1]))"
    (tmp_path / "p").write_text("#!/bin/sh\n")
    (tmp_path / "p").chmod(0o755)
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,noexec {tmp_path}"
    words = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", program, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "mounted with noexec" in done.stdout
