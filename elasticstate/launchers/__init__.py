"""Launchers: how the agent of a host is started.

A launcher is a subclass of :class:`Launcher` with a name. ``--launcher`` chooses one for all hosts; without the option,
:class:`HostLaunchers` does. Packages add their own by entry points (docs/guides/hosts.md). Most launchers need only a
command that runs another command on a host: see launchers/command.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from elasticstate import processes
from elasticstate.failures import how_it_ended
from elasticstate.net.messages import Launch
from elasticstate.net.names import is_this_machine
from elasticstate.options import Options, agent_variable
from elasticstate.plug_ins import plug_in
from elasticstate.threads import in_thread
from elasticstate.writing import Writer

GROUP = "elasticstate.launchers"
LAUNCHERS = {
    "local": "elasticstate.launchers:LocalLauncher",
    "ssh": "elasticstate.launchers.command:SshLauncher",
    "slurm": "elasticstate.launchers.command:SrunLauncher",
    "ray": "elasticstate.ray:RayLauncher",
}
"""The project's own launchers."""


class AgentProcess(Protocol):
    """An agent, as its launcher sees it."""

    @property
    def is_local(self) -> bool:
        """Return True if this process can end the agent with all its workers, and detect their end."""

    async def ended(self) -> str:
        """Wait for the end of the process that was started. Return how it ended."""

    def kill(self) -> None:
        """Send SIGKILL to the process that was started, if it lives."""

    async def clear(self) -> None:
        """Kill remaining processes of an agent that has ended, as far as possible from here."""


class Launcher:
    """Starter of agents. An agent is ``python -m elasticstate.agent``; it reads its parameters from its stdin.

    Attributes:
        is_local: True if agents are children of this process. They share its directory and its environment.
    """

    is_local = False

    def __init__(self, options: Options) -> None:
        """Raise OptionError if this launcher cannot be used with these options."""
        self.options = options

    def refuse(self, host: str) -> str:
        """Return why no agent can be started on a host, or "". May block: it is called in a thread."""
        return ""

    def start(self, launch: Launch, log: Path) -> AgentProcess:
        """Start the agent of ``launch.host``. ``log``: a path for a file with messages. Raises OSError."""
        raise NotImplementedError


class HostLaunchers:
    """The launcher of each host: that of ``--launcher``, else the allocation's, else by the host's name."""

    def __init__(self, options: Options) -> None:
        """Raise OptionError if a launcher cannot be used with these options."""
        name = options.launcher or (options.discovery if options.discovery in ("slurm", "ray") else "")
        self._chosen = _launcher(name, options) if name else None
        self._local, self._ssh = _launcher("local", options), _launcher("ssh", options)

    def of(self, host: str) -> Launcher:
        """Return the launcher of a host."""
        if self._chosen is not None:
            return self._chosen
        return self._local if is_this_machine(host) else self._ssh

    def refuse(self, host: str) -> str:
        """Return why no agent can be started on a host, or ""."""
        return self.of(host).refuse(host)


def _launcher(name: str, options: Options) -> Launcher:
    return plug_in("--launcher", GROUP, LAUNCHERS, name, Launcher)(options)


# --------------------------------------------------------------------------------------------------------- this machine
# Agents that no command starts: children of the driver on this machine, and those that dial in.
#
# elasticrun starts one before it imports the driver's modules, so that driver and agent import at the same time. This
# takes 0.2 s each.


AGENT = "elasticstate.agent"

_waiting: list[subprocess.Popen[bytes]] = []
_stdins: list[int] = []  # for a worker of an agent of this machine; not more than one


@contextmanager
def early_agent(is_needed: bool, stdin: int | None = None) -> Iterator[None]:
    """Start a process that imports the agent's modules. It ends with the context if no agent needs it.

    ``stdin``: a descriptor that this process, and all that become agents later, inherit for a worker.
    """
    if stdin is not None:
        _stdins.append(stdin)
    if is_needed:
        with suppress(OSError):  # the start of an agent reports it
            _waiting.append(_start())
    try:
        yield
    finally:
        for process in _waiting:
            process.kill()
            process.communicate()
        _waiting.clear()
        _stdins.clear()


def agent_process() -> subprocess.Popen[bytes]:
    """Return a process that reads an agent's parameters from its stdin. Raises OSError if it cannot be started."""
    return _waiting.pop() if _waiting else _start()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", AGENT],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[2],  # first in sys.path: the agent imports this very package
        pass_fds=_stdins,
        start_new_session=True,  # Ctrl-C in the terminal is for the driver
    )


def send_parameters(process: subprocess.Popen[bytes], launch: Launch) -> None:
    """Send an agent its parameters, in a thread: the pipe takes 64 KiB; for more, the command must connect first."""
    assert process.stdin is not None
    line, fd = msgspec.json.encode(launch) + b"\n", os.dup(process.stdin.fileno())
    process.stdin.close()
    stdin = Writer(lambda: fd, len(line))
    stdin.put(line)
    stdin.close()


class LocalLauncher(Launcher):
    """Launcher on this machine: a process for each name that means it."""

    is_local = True

    def refuse(self, host: str) -> str:
        return "" if is_this_machine(host) else f"host {host!r} is another machine, and --launcher is local"

    def start(self, launch: Launch, log: Path) -> LocalAgent:
        return LocalAgent(launch)


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


class LocalAgent(AdoptedAgent):
    """An agent's process on this machine, with all processes that must end with it."""

    def __init__(self, launch: Launch) -> None:
        """Start the process. Raises OSError if that fails."""
        self._process = agent_process()
        self._mark = agent_variable(launch.socket)
        processes.give_back_descriptors(self.pid)  # before it begins: it waits for its parameters
        send_parameters(self._process, replace(launch, stdin=_stdins[0] if _stdins else None))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        await processes.ended_child(self.pid)
        return how_it_ended(await in_thread(self._process.wait))  # the kernel may wait for locks of /proc

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


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
