"""The status of an agent, which a socket on its host gives, and the commands that ask for it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticstate.net.link import ask_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An agent that waits for its driver, with the status socket ``agent``."""
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        command = ["agent", "--join", f"127.0.0.1:{listener.getsockname()[1]}", "--token-file", str(token)]
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticstate", *command, "--name", "h", "--status-socket", str(tmp_path / "agent")],
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = listener.accept()  # the agent is up
        yield process
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=30)
        connection.close()


def status(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elasticstate", "status", "--agent", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_an_agent_without_a_driver_is_alive_and_not_ready(agent: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "agent"
    alive = status(path)
    assert (alive.returncode, alive.stderr) == (0, "")
    assert alive.stdout.startswith("agent of host h: waits for a driver at 127.0.0.1:")
    ready = status(path, "--ready")
    assert (ready.returncode, ready.stdout) == (1, alive.stdout)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    agent.terminate()
    agent.wait(30)
    assert not path.exists()
    gone = status(path)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr == f"elasticrun: no agent answers at {path}: No such file or directory\n"


def test_an_agent_that_stands_still_does_not_answer(agent: subprocess.Popen[str], tmp_path: Path) -> None:
    agent.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, agent.pid, os.WSTOPPED)
    with pytest.raises(TimeoutError):
        ask_agent(str(tmp_path / "agent"), 0.2)
    agent.send_signal(signal.SIGCONT)
    assert not ask_agent(str(tmp_path / "agent"), 30).is_ready


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["status", "--agent"], "status: --agent: expected one argument"),
        (["agent", "--join", "h:1", "--token-file", "token", "--status-socket", "no/agent"], "--status-socket: 'no/ag"),
    ],
)
def test_a_wrong_use_is_a_usage_error(command: list[str], message: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-m", "elasticstate", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"elasticrun: {message}")


def test_a_file_at_the_path_of_the_socket_stays(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("weights")
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    command = ["agent", "--join", "127.0.0.1:1", "--token-file", "token", "--status-socket", "model.pt"]
    done = subprocess.run(
        [sys.executable, "-m", "elasticstate", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "--status-socket: 'model.pt': cannot be created" in done.stderr
    assert (tmp_path / "model.pt").read_text() == "weights"
