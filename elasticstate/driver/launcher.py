"""Start of agents: a process on this machine for each name that means it, and an ssh connection for each other host.

An agent reads its parameters from its stdin, so that no list of processes shows them.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from elasticstate import processes
from elasticstate.config import Options, agent_variable
from elasticstate.driver.early_agent import AGENT, agent_process
from elasticstate.exit_status import how_it_ended
from elasticstate.net.launch import Launch
from elasticstate.net.names import is_this_machine
from elasticstate.threads import in_thread
from elasticstate.writing import Writer

_SSH_FAILED = 255


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


def refuse(host: str) -> str:
    """Return why no agent can be started on a host, or ""."""
    if is_this_machine(host) or shutil.which("ssh"):
        return ""
    return f"host {host!r} is another machine, and this machine has no ssh. Install OpenSSH's client"


def start(launch: Launch, options: Options, log: Path) -> AgentProcess:
    """Start the agent of ``launch.host``; ssh may write to ``log``. Raises OSError if that fails."""
    return LocalAgent(launch) if is_this_machine(launch.host) else SshAgent(launch, options, log)


class LocalAgent:
    """An agent's process on this machine, with all processes that must end with it."""

    is_local = True

    def __init__(self, launch: Launch) -> None:
        """Start the process. Raises OSError if that fails."""
        self._process = agent_process()
        self._mark = agent_variable(launch.socket)
        processes.give_back_descriptors(self.pid)  # before it begins: it waits for its parameters
        _send_parameters(self._process, launch)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        await processes.ended_child(self.pid)
        return how_it_ended(self._process.wait())

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


class SshAgent:
    """An agent on another host, and the ssh connection that started it and carries its output."""

    is_local = False

    def __init__(self, launch: Launch, options: Options, log: Path) -> None:
        """Start ssh. Raises OSError if that fails."""
        self._host = launch.host
        self._python = options.remote_python or sys.executable
        self._log = log  # ssh's own messages go here, apart from the workers' output
        log.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            ssh_command(launch.host, self._python, options, log),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the driver
        )
        _send_parameters(self._process, launch)

    async def ended(self) -> str:
        await processes.ended_child(self._process.pid)
        return how_ssh_ended(self._process.wait(), self._host, self._python, self._log)

    def kill(self) -> None:
        """End the connection. An agent that still lives has received Shutdown, or gives up without its driver."""
        if self._process.returncode is None:
            self._process.kill()

    async def clear(self) -> None:
        """Do nothing: processes on another host cannot be killed from here."""


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


def ssh_command(
    host: str, python: str, options: Options, log: Path, arguments: Sequence[str] = ("-m", AGENT)
) -> list[str]:
    """Return the command of OpenSSH's client that runs Python on a host with these arguments.

    The user's own ssh configuration applies; options given here override it. ssh writes its own messages to ``log``.
    """
    interval_s = max(1, round(options.heartbeat_timeout_s / 2))
    settings = {
        "BatchMode": "yes",  # no password prompt
        "ConnectTimeout": str(max(1, round(options.connect_timeout_s))),
        "ServerAliveInterval": str(interval_s),
        "ServerAliveCountMax": "3",
        "ControlPath": "none",  # a connection of its own, whose end has a meaning
    }
    if not options.ssh_check_host_keys:
        settings |= {"StrictHostKeyChecking": "no", "UserKnownHostsFile": os.devnull}
    command = ["ssh", "-T", "-E", str(log)]
    for name, value in settings.items():
        command += ["-o", f"{name}={value}"]
    if options.ssh_port is not None:
        command += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        command += ["-i", options.ssh_identity_file]
    return [*command, "--", host, f"exec {shlex.join([python, *arguments])}"]


def how_ssh_ended(code: int, host: str, python: str, log: Path) -> str:
    """Return how an :func:`ssh_command` ended, and what the user can do about it."""
    if code == _SSH_FAILED:
        return f"is unreachable by ssh: {_explain(host, _last_line(log))}"
    if code in (126, 127):
        return f"could not be started: host {host} has no {python}: see --remote-python"
    return how_it_ended(code)


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
    return ""


def _send_parameters(process: subprocess.Popen[bytes], launch: Launch) -> None:
    """Send an agent its parameters, in a thread: the pipe takes 64 KiB; for more, ssh must connect first."""
    assert process.stdin is not None
    line, fd = msgspec.json.encode(launch) + b"\n", os.dup(process.stdin.fileno())
    process.stdin.close()
    stdin = Writer(lambda: fd, len(line))
    stdin.put(line)
    stdin.close()


_REMEDIES = {
    "Host key verification failed": "add the host's key to known_hosts (ssh-keyscan), or, in a trusted network, give "
    "--no-ssh-check-host-keys",
    "Permission denied": "the host accepts none of your keys: see --ssh-identity-file and ssh-copy-id",
    "Connection refused": "no ssh server listens there: see --ssh-port",
    "Could not resolve hostname": "this machine cannot resolve the name: check the list of hosts and ~/.ssh/config",
    "timed out": "the host does not answer: see --connect-timeout",
    "No route to host": "this machine has no route to the host",
}


def _explain(host: str, message: str) -> str:
    """Return ssh's message, and what the user can do about it."""
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words in message), "")
    message = message or f"ssh {host} printed no message"
    return f"{message} ({remedy})" if remedy else message
