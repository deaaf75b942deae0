"""Starting agents: on this machine, one process for each name that means it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from elasticstate import processes
from elasticstate.config import socket_variable
from elasticstate.net.messages import Launch
from elasticstate.net.names import is_this_machine


def refuse(host: str) -> str:
    """Why no agent can be started on a host; "" when one can."""
    if is_this_machine(host):
        return ""
    return f"host {host!r} is not this machine; remote hosts come with ssh support"


class LocalAgent:
    """An agent's process on this machine, and what must be ended with it."""

    def __init__(self, launch: Launch) -> None:
        """Starts the process. Raises OSError when that cannot be done."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "elasticstate.agent"],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # first in its path: it runs this very package, and nothing of the user's
            start_new_session=True,  # Ctrl-C in the terminal is for the driver
        )
        self._mark = socket_variable(launch.socket)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        with suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode(launch) + b"\n")
            self._stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        """Wait for its end; says how it ended."""
        await processes.ended(self.pid)
        code = self._process.wait()
        return f"was killed by {processes.signal_name(-code)}" if code < 0 else f"exited with {code}"

    def kill(self) -> None:
        """SIGKILL to the agent, and to all that its workers have started, wherever it has fled to."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._stdin.close()
        processes.kill_marked(*self._mark)
