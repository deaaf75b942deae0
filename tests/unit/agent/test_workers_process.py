"""Real worker processes: the report of their ends, and the cleanup of their sessions."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from elasticstate.agent.template_process import start_command
from elasticstate.agent.worker_output import Audience, Outputs, Pump
from elasticstate.agent.workers import Ending, WorkerProcess
from elasticstate.core.ids import WorkerId
from elasticstate.options import Options
from elasticstate.processes import session_members

W = WorkerId("h", 1, 1)


async def until(condition: Callable[[], bool], what: str) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    try:
        await asyncio.wait_for(look(), 60)
    except asyncio.TimeoutError:
        pytest.fail(f"has not come: {what}")


def started(worker: WorkerId, command: list[str], directory: str, *pumps: Pump) -> WorkerProcess:
    """Start a command as a worker."""
    (out, stdout), (err, stderr) = os.pipe(), os.pipe()
    child = start_command(command, os.environ, directory, subprocess.DEVNULL, stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    return WorkerProcess(worker, child, *pumps, pipes=(out, err))


def run(
    directory: Path, command: list[str], meanwhile: Callable[[WorkerProcess], Awaitable[None]] | None = None
) -> Ending:
    """Run a command as a worker, with its output in log files."""

    async def scenario() -> Ending:
        pumps = Outputs("h").pumps(W, Options(command=(), log_dir=str(directory), tee=0), Audience(()))
        process = started(W, command, str(directory), *pumps)
        if meanwhile is not None:
            await meanwhile(process)
        ending = await asyncio.wait_for(process.ended(), 20)
        await until(lambda: not session_members(process.pid), "the end of the killed processes of the session")
        return ending

    return asyncio.run(scenario())


def logged(log: Path) -> list[str]:
    """Return the output of each process of the slot."""
    begin, *printed = re.split(rf"^--- {W} starts at [0-9T:.+-]{{29}}\n", log.read_text(), flags=re.MULTILINE)
    assert begin == ""
    return printed


def test_a_slots_log_goes_on_with_the_next_process(tmp_path: Path) -> None:
    for word in ("first", "second"):
        run(tmp_path, ["echo", word])
    assert logged(tmp_path / "h-1.out") == ["first\n", "second\n"]


def test_output_of_a_command_is_complete_when_it_has_ended(tmp_path: Path) -> None:
    script = "import sys; print('x' * 300000); sys.stderr.write('oops'); sys.exit(3)"
    assert run(tmp_path, [sys.executable, "-c", script]) == Ending(3, None, "oops")
    assert logged(tmp_path / "h-1.out") == ["x" * 300000 + "\n"]
    assert logged(tmp_path / "h-1.err") == ["oops"]


def test_the_command_finds_its_directory_and_no_stdin_and_leads_its_session(tmp_path: Path) -> None:
    script = "import os, sys; print(os.getcwd(), sys.stdin.read() == '', os.getsid(0) == os.getpid())"
    assert run(tmp_path, [sys.executable, "-c", script]) == Ending(0, None, "")
    assert logged(tmp_path / "h-1.out") == [f"{tmp_path} True True\n"]


def test_a_signal_is_told_by_its_number(tmp_path: Path) -> None:
    assert run(tmp_path, ["sh", "-c", "kill -SEGV $$"]) == Ending(None, signal.SIGSEGV, "")


def test_a_command_that_is_not_there_exits_with_127(tmp_path: Path) -> None:
    said = "elasticstate: cannot run './nope': No such file or directory"
    assert run(tmp_path, ["./nope"]) == Ending(127, None, said)


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start_command(["true"], {}, str(tmp_path / "nope"), 0, 1, 2)


def test_what_a_command_leaves_in_its_session_ends_with_it(tmp_path: Path) -> None:
    """Children may have process groups of their own, and ignore all signals that can be ignored."""
    seen = tmp_path / "seen"
    child = "import os, time; os.setpgid(0, 0); print('up', flush=True); time.sleep(100)"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        f"children = [subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE) for _ in range(3)]\n"
        "for child in children: child.stdout.readline()\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
        "print('all up')\n"
    )

    async def see_them(process: WorkerProcess) -> None:
        await until(lambda: len(session_members(process.pid)) >= 4, "three children")
        seen.touch()

    assert run(tmp_path, [sys.executable, "-c", script], see_them) == Ending(0, None, "")
    assert logged(tmp_path / "h-1.out") == ["all up\n"]


def test_a_process_that_fled_the_session_with_the_pipe_delays_the_end_only_for_a_while(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"setsid sleep 100 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 100"

    async def wait_and_kill(process: WorkerProcess) -> None:
        await until(pid_file.exists, "the pid of the fugitive")
        fugitive = int(pid_file.read_text())
        await until(lambda: os.getsid(fugitive) == fugitive, "its own session")
        process.kill()

    try:
        assert run(tmp_path, ["sh", "-c", script], wait_and_kill) == Ending(None, signal.SIGKILL, "")
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_terminate_and_kill(tmp_path: Path) -> None:
    async def terminate(process: WorkerProcess) -> None:
        await until(lambda: (tmp_path / "up").exists(), "the command")
        process.terminate()

    async def kill(process: WorkerProcess) -> None:
        await until(lambda: (tmp_path / "up").exists(), "the command")
        process.kill()

    stubborn = ["sh", "-c", "trap 'exit 7' TERM; touch up; while :; do sleep 0.01; done"]
    assert run(tmp_path, stubborn, terminate)[:2] == (7, None)
    (tmp_path / "up").unlink()
    assert run(tmp_path, stubborn, kill)[:2] == (None, signal.SIGKILL)


def test_a_worker_dies_with_its_agent(tmp_path: Path) -> None:
    """The agent is simulated by a process that starts a worker as agents do. The test then kills it."""
    agent = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from elasticstate.agent.worker_output import Audience, Outputs
from elasticstate.options import Options
from elasticstate.core.types import WorkerId
from test_workers_process import started

async def main():
    worker = WorkerId("h", 0, 1)
    pumps = Outputs("h").pumps(worker, Options(command=()), Audience(()))
    process = started(worker, ["sh", "-c", "echo $$; exec sleep 100"], {str(tmp_path)!r}, *pumps)
    await process.ended()

asyncio.run(main())
"""

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", agent, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        worker = int((await process.stdout.readline()).removeprefix(b"[h:0] "))
        assert session_members(worker) == {worker}
        process.kill()
        await process.wait()
        await until(lambda: not session_members(worker), "the death of the worker")

    asyncio.run(scenario())
