"""Agents that no command starts: children of the driver on this machine, and those that dial in."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from elasticstate import processes
from elasticstate.failures import how_it_ended
from elasticstate.launchers import Launcher
from elasticstate.launchers.command import agent_process, send_parameters
from elasticstate.net.messages import Launch
from elasticstate.net.names import is_this_machine
from elasticstate.options import agent_variable
from elasticstate.threads import in_thread


class LocalLauncher(Launcher):
    """Launcher on this machine: a process for each name that means it."""

    is_local = True

    def refuse(self, host: str) -> str:
        return "" if is_this_machine(host) else f"host {host!r} is another machine, and --launcher is local"

    def start(self, launch: Launch, log: Path) -> LocalAgent:
        return LocalAgent(launch)


class LocalAgent:
    """An agent's process on this machine, with all processes that must end with it."""

    is_local = True

    def __init__(self, launch: Launch) -> None:
        """Start the process. Raises OSError if that fails."""
        self._process = agent_process()
        self._mark = agent_variable(launch.socket)
        processes.give_back_descriptors(self.pid)  # before it begins: it waits for its parameters
        send_parameters(self._process, launch)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        await processes.ended_child(self.pid)
        return how_it_ended(await in_thread(self._process.wait))  # the kernel may wait for locks of /proc

    def kill(self) -> None:
        """Kill the agent. Its workers die with it (PR_SET_PDEATHSIG)."""
        if self._process.returncode is None:
            self._process.kill()

    async def clear(self) -> None:
        """Send SIGKILL to all processes that its workers have started, even in other sessions."""
        await in_thread(processes.kill_marked, *self._mark)


class AdoptedAgent:
    """An agent on this machine that the previous driver has started."""

    is_local = True

    def __init__(self, pid: int, socket: str) -> None:
        """Open the process. Raises ProcessLookupError if it has ended."""
        self._pidfd = os.pidfd_open(pid)
        self._mark = agent_variable(socket)

    async def ended(self) -> str:
        await processes.ended(self._pidfd)
        return "exited"

    def kill(self) -> None:
        """Kill the agent. Its workers die with it (PR_SET_PDEATHSIG)."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def clear(self) -> None:
        """Send SIGKILL to all processes that its workers have started, even in other sessions."""
        await in_thread(processes.kill_marked, *self._mark)


class DialledIn:
    """An agent that this driver did not start."""

    is_local = False

    def __init__(self) -> None:
        self._over = asyncio.Event()

    async def ended(self) -> str:
        await self._over.wait()
        return "closed its connection"

    def kill(self) -> None:
        """Stop waiting for it."""
        self._over.set()

    async def clear(self) -> None:
        """Do nothing: processes on another host cannot be killed from here."""
