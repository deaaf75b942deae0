"""An agent without a driver, before its first connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_that_looks_for_its_driver_ends_by_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """A listener that is not its driver accepts at the address, and sends nothing."""
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)  # until the agent dials
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        agent = subprocess.Popen(
            [sys.executable, "-m", "elasticstate", "agent", "--join", address, "--token-file", str(token)],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            connection, _ = listener.accept()
            agent.send_signal(number)
            _, said = agent.communicate(timeout=5)
        finally:
            agent.kill()
            agent.wait()
        connection.close()
    assert (agent.returncode, said) == (128 + number, "")
    assert os.listdir(os.environ["XDG_RUNTIME_DIR"]) == []
