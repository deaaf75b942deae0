"""The preemption command: a real agent runs it repeatedly until it announces a preemption."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from elasticstate.net import messages
from tests.kit.agent import Scene, play


def script(directory: Path, body: str) -> str:
    path = directory / "notice.sh"
    path.write_text(f"#!/bin/sh\necho $$ >> {directory}/asked\n{body}\n")
    path.chmod(0o755)
    return str(path)


def times_asked(directory: Path) -> int:
    asked = directory / "asked"
    return len(asked.read_text().splitlines()) if asked.exists() else 0


def notices(scene: Scene) -> list[messages.FromAgent]:
    return [message for message in scene.heard if isinstance(message, messages.HostDraining | messages.AgentWarning)]


async def ends_well(scene: Scene) -> None:
    scene.send(messages.Shutdown("done"))
    status, said = await scene.end()
    assert status == 0, said
    assert "Traceback" not in said


def test_it_is_asked_until_it_gives_notice_and_not_after(tmp_path: Path) -> None:
    """The command runs in the job's directory, with the environment of the workers. Its first line is the reason."""
    body = 'test -e go || exit 1; echo "going: $PASSED $ELASTICSTATE_HOST"; echo more; echo oops >&2; exit 0'

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", preemption_command=script(tmp_path, body), stop_timeout_s=0.2)
        await scene.until(lambda: times_asked(tmp_path) >= 3, "three calls")
        assert notices(scene) == []
        (tmp_path / "go").touch()
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", "going: on h")
        count = times_asked(tmp_path)
        scene.agent.send_signal(signal.SIGTERM)  # too late for a second notice
        scene.send(messages.Shutdown("drained"))  # waits for the stop time-out
        assert (await scene.end())[0] == 0
        assert times_asked(tmp_path) == count
        assert len(notices(scene)) == 1

    play(tmp_path, scenario)


def test_a_signal_ends_the_asking(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", preemption_command=script(tmp_path, "sleep 100"), stop_timeout_s=0.2)
        await scene.until(lambda: times_asked(tmp_path) == 1, "a call")
        asked = int((tmp_path / "asked").read_text())
        scene.agent.send_signal(signal.SIGTERM)
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", "SIGTERM to its agent")
        await scene.until(lambda: not psutil.pid_exists(asked), "the end of the command")
        await ends_well(scene)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "timeout_s", "said"),
    [
        ("echo one >&2; echo two >&2; exit 3", 5.0, "exited with 3: two"),
        ("exit 4", 5.0, "exited with 4: nothing on stderr"),
        ("kill -KILL $$", 5.0, "was killed by SIGKILL: nothing on stderr"),
        ("sleep 100", 0.1, "took longer than 0.1 s"),
    ],
)
def test_any_other_answer_is_warned_of_once_and_asking_goes_on(
    tmp_path: Path, body: str, timeout_s: float, said: str
) -> None:
    command = script(tmp_path, f"test -e go && exit 0; {body}")

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(
            "sleep", "100", preemption_command=command, preemption_timeout_s=timeout_s, stop_timeout_s=0.2
        )
        warning = await scene.hear(messages.AgentWarning)
        assert warning.text == f"--preemption-command {command!r} {said}; it runs again every 0.05 s"
        count = times_asked(tmp_path)
        await scene.until(lambda: times_asked(tmp_path) >= count + 3, "more calls")
        assert notices(scene) == [warning]
        (tmp_path / "go").touch()
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", f"{command} exited with 0")
        pids = [int(line) for line in (tmp_path / "asked").read_text().split()]
        await scene.until(lambda: not any(map(psutil.pid_exists, pids)), "the end of all calls")
        await ends_well(scene)

    play(tmp_path, scenario)


def test_a_command_that_is_not_there_is_warned_of(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", preemption_command="no-such-command -x", stop_timeout_s=0.2)
        text = (await scene.hear(messages.AgentWarning)).text
        assert text.startswith("--preemption-command 'no-such-command -x' cannot be run: [Errno 2] No such file")
        await ends_well(scene)

    play(tmp_path, scenario)


def test_a_slow_command_holds_nothing_up_and_ends_with_the_agent(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        command = script(tmp_path, "exec python3 -c 'import os, time; os.write(1, bytes(9000000)); time.sleep(100)'")
        await scene.serve("sleep", "100", preemption_command=command, preemption_timeout_s=60.0, stop_timeout_s=0.2)
        await scene.until(lambda: times_asked(tmp_path) == 1, "a call")
        asked = int((tmp_path / "asked").read_text())
        await scene.hear(messages.Stamps)  # heartbeat of the agent
        assert os.getsid(asked) == asked, "in a session of its own"
        scene.send(messages.Shutdown("done"))
        assert (await asyncio.wait_for(scene.end(), 60))[0] == 0
        assert not psutil.pid_exists(asked)

    play(tmp_path, scenario)
