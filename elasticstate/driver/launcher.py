"""Starting agents: a process on this machine for each name that means it, and one ssh connection for each other host.

An agent reads what it has to know from its stdin, so that nothing of it is seen in a list of processes.
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
from elasticstate.config import Options, socket_variable
from elasticstate.net.launch import Launch
from elasticstate.net.names import is_this_machine

_SSH_FAILED = 255
_AGENT = "elasticstate.agent"


class AgentProcess(Protocol):
    """An agent, as far as its launcher knows."""

    @property
    def is_local(self) -> bool:
        """Whether its end, and that of all its workers, can be brought about and seen from here."""

    async def ended(self) -> str:
        """Wait for the end of the process that was started; says how it ended."""

    def kill(self) -> None:
        """End it, and what it has started, as far as that can be done from here."""


def refuse(host: str) -> str:
    """Why no agent can be started on a host; "" when one can."""
    if is_this_machine(host) or shutil.which("ssh"):
        return ""
    return f"host {host!r} is not this machine, and there is no ssh to reach it with: install OpenSSH's client"


def start(launch: Launch, options: Options, log: Path) -> AgentProcess:
    """Start the agent of ``launch.host``; ``log`` may be written to. Raises OSError when that cannot be done."""
    return LocalAgent(launch) if is_this_machine(launch.host) else SshAgent(launch, options, log)


class LocalAgent:
    """An agent's process on this machine, and what must be ended with it."""

    is_local = True

    def __init__(self, launch: Launch) -> None:
        """Starts the process. Raises OSError when that cannot be done."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", _AGENT],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # first in its path: it runs this very package, and nothing of the user's
            start_new_session=True,  # Ctrl-C in the terminal is for the driver
        )
        self._mark = socket_variable(launch.socket)
        _tell(self._process, launch)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        await processes.ended_child(self.pid)
        return _how(self._process.wait())

    def kill(self) -> None:
        """SIGKILL to the agent, and to all that its workers have started, wherever it has fled to."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        processes.kill_marked(*self._mark)


class AdoptedAgent:
    """An agent on this machine that a driver before this one has started."""

    is_local = True

    def __init__(self, pid: int, socket: str) -> None:
        """Raises ProcessLookupError when it has ended."""
        self._pidfd = os.pidfd_open(pid)
        self._mark = socket_variable(socket)

    async def ended(self) -> str:
        await processes.ended(self._pidfd)
        return "has ended"

    def kill(self) -> None:
        """SIGKILL to the agent, and to all that its workers have started, wherever it has fled to."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        processes.kill_marked(*self._mark)


class SshAgent:
    """An agent on another host, and the connection that it was started by: its output comes through it."""

    is_local = False

    def __init__(self, launch: Launch, options: Options, log: Path) -> None:
        """Starts ssh. Raises OSError when that cannot be done."""
        self._host = launch.host
        self._python = options.remote_python or sys.executable
        self._log = log  # what ssh itself says goes here, and not between the workers' words
        log.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            ssh_command(launch.host, self._python, options, log),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the driver
        )
        _tell(self._process, launch)

    async def ended(self) -> str:
        await processes.ended_child(self._process.pid)
        return how_ssh_ended(self._process.wait(), self._host, self._python, self._log)

    def kill(self) -> None:
        """Ends the connection. An agent that lives on there has been told to stop, or gives up without its driver."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class DialledIn:
    """An agent that nobody here has started."""

    is_local = False

    def __init__(self) -> None:
        self._over = asyncio.Event()

    async def ended(self) -> str:
        await self._over.wait()
        return "has left"

    def kill(self) -> None:
        """It is not waited for any more."""
        self._over.set()


def ssh_command(
    host: str, python: str, options: Options, log: Path, arguments: Sequence[str] = ("-m", _AGENT)
) -> list[str]:
    """OpenSSH's client, with the user's own configuration; what is given here goes before it. It runs that Python there
    with these arguments, and says to the file ``log`` what it has to say itself."""
    interval_s = max(1, round(options.heartbeat_timeout_s / 2))
    settings = {
        "BatchMode": "yes",  # nobody is there to be asked
        "ConnectTimeout": str(max(1, round(options.connect_timeout_s))),
        "ServerAliveInterval": str(interval_s),
        "ServerAliveCountMax": "3",
        "ControlPath": "none",  # a connection of its own, whose end means something
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
    """What has become of an :func:`ssh_command`, and what can be done about it."""
    if code == _SSH_FAILED:
        return f"was out of reach for ssh: {_explain(host, _last_line(log))}"
    if code in (126, 127):
        return f"could not be started: there is no {python} on {host}: see --remote-python"
    return _how(code)


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
    return ""


def _tell(process: subprocess.Popen[bytes], launch: Launch) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(msgspec.json.encode(launch) + b"\n")


def _how(code: int) -> str:
    return f"was killed by {processes.signal_name(-code)}" if code < 0 else f"exited with {code}"


_REMEDIES = {
    "Host key verification failed": "its host key is not known: add it to known_hosts (ssh-keyscan), or, where the "
    "network can be trusted, give --no-ssh-check-host-keys",
    "Permission denied": "no key of yours is accepted there: see --ssh-identity-file and ssh-copy-id",
    "Connection refused": "no ssh server listens there: see --ssh-port",
    "Could not resolve hostname": "its name is not known here: see discovery and ~/.ssh/config",
    "timed out": "it does not answer: see --connect-timeout",
    "No route to host": "there is no way to it from here",
}


def _explain(host: str, said: str) -> str:
    """What ssh said, and what can be done about it."""
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words in said), "")
    said = said or f"ssh {host} ended without a word"
    return f"{said} ({remedy})" if remedy else said
