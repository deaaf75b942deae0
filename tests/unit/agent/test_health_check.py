"""The health check on a host: a real agent runs real commands when it is asked to, and leaves no process behind."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from elasticstate.net import messages
from tests.kit.agent import Scene, play

ORDER = messages.CheckHealth("h")


def command(directory: Path, body: str) -> str:
    path = directory / "check.sh"
    path.write_text(f"#!/bin/sh\necho $$ >> {directory}/pids\n{body}\n")
    path.chmod(0o755)
    return str(path)


def pids(directory: Path) -> list[int]:
    path = directory / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def answer(scene: Scene) -> str:
    """Ask for a check, and return the fault that is found."""
    scene.heard = [message for message in scene.heard if not isinstance(message, messages.HealthChecked)]
    scene.send(ORDER)
    found = await scene.hear(messages.HealthChecked)
    assert found.host == "h"
    return found.fault


async def ends_well(scene: Scene) -> None:
    scene.send(messages.Shutdown("done"))
    status, said = await scene.end()
    assert status == 0, said
    assert "Traceback" not in said


def test_a_host_is_well_when_the_command_exits_with_0_and_is_asked_again_by_the_next_order(tmp_path: Path) -> None:
    body = 'test ! -e broken || { echo one; echo "two on $ELASTICSTATE_HOST, $PASSED" >&2; echo; exit 3; }; echo fine'

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", health_check=command(tmp_path, body), stop_timeout_s=0.2)
        assert pids(tmp_path) == [], "only when it is asked for"
        assert await answer(scene) == ""
        (tmp_path / "broken").touch()
        assert await answer(scene) == "two on h, on"
        (tmp_path / "broken").unlink()
        assert await answer(scene) == ""
        assert len(pids(tmp_path)) == 3
        await ends_well(scene)

    play(tmp_path, scenario)


def test_the_fault_is_the_last_line_or_else_how_the_command_has_ended(tmp_path: Path) -> None:
    """A file that is no program is a fault with its remedy."""

    async def scenario(scene: Scene) -> None:
        path = command(tmp_path, f". {tmp_path}/rest")
        await scene.start()
        await scene.serve("sleep", "100", health_check=path, stop_timeout_s=0.2)
        for rest, fault in (
            ("exit 4", "exited with 4"),
            ("echo here; kill -KILL $$", "was killed by SIGKILL: here"),
            ("printf 'a\\007b\\n'; exit 1", "a?b"),
        ):
            (tmp_path / "rest").write_text(rest)
            assert await answer(scene) == fault
        os.chmod(path, 0o644)
        fault = await answer(scene)
        assert fault.startswith("cannot be run: [Errno 13] Permission denied")
        assert fault.endswith(f"Make the file executable: chmod +x {path}")
        await ends_well(scene)

    play(tmp_path, scenario)


def test_a_command_that_hangs_is_killed_with_its_whole_session(tmp_path: Path) -> None:
    """Also a child in a process group of its own, which keeps the output open. Two orders meanwhile are one check."""
    body = f"echo tries the GPU; timeout 1000 sleep 1000 & echo $! >> {tmp_path}/pids; wait"

    async def scenario(scene: Scene) -> None:
        await scene.start()
        script = command(tmp_path, body)
        await scene.serve("sleep", "100", health_check=script, start_timeout_s=4.0, stop_timeout_s=0.2)
        scene.send(ORDER)
        await scene.until(lambda: len(pids(tmp_path)) == 2, "the command and its child")
        await scene.until(lambda: os.getpgid(pids(tmp_path)[1]) == pids(tmp_path)[1], "its own process group")
        assert await answer(scene) == "took longer than 2 s: tries the GPU"
        assert len(pids(tmp_path)) == 2
        await scene.until(lambda: not any(map(psutil.pid_exists, pids(tmp_path))), "the end of both")
        await ends_well(scene)

    play(tmp_path, scenario)


def test_a_command_ends_with_its_agent(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", health_check=command(tmp_path, "exec sleep 1000"), stop_timeout_s=0.2)
        scene.send(ORDER)
        await scene.until(lambda: len(pids(tmp_path)) == 1, "the command")
        await scene.hear(messages.Stamps)  # heartbeat of the agent
        await ends_well(scene)
        assert not psutil.pid_exists(pids(tmp_path)[0])

    play(tmp_path, scenario)
