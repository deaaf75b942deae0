"""Agents on other hosts, started by OpenSSH's client."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate.exit_status import how_it_ended
from elasticstate.launchers.command import SAME_PYTHON, CommandLauncher

_SSH_FAILED = 255


class SshLauncher(CommandLauncher):
    """Launcher by ssh. The user's own ssh configuration applies; options given here override it."""

    def refuse(self, host: str) -> str:
        if shutil.which("ssh"):
            return ""
        return f"host {host!r} is another machine, and this machine has no ssh. Install OpenSSH's client"

    def command(self, host: str, arguments: Sequence[str], log: Path, name: str) -> list[str]:
        options = self.options
        interval_s = max(1, round(options.heartbeat_timeout_s / 2))
        settings = {
            "BatchMode": "yes",  # no password prompt
            "ConnectTimeout": str(math.ceil(options.connect_timeout_s)),
            "ServerAliveInterval": str(interval_s),
            "ServerAliveCountMax": "3",
            "ControlPath": "none",  # a connection of its own, whose end has a meaning
        }
        command = ["ssh", "-T", "-E", str(log)]
        for name, value in settings.items():
            command += ["-o", f"{name}={value}"]
        if options.ssh_port is not None:
            command += ["-p", str(options.ssh_port)]
        if options.ssh_identity_file is not None:
            command += ["-i", options.ssh_identity_file]
        return [*command, "--", host, f"exec {shlex.join([self.python, *arguments])}"]

    def how_ended(self, host: str, code: int, log: Path) -> str:
        if code == _SSH_FAILED:
            return f"is unreachable by ssh: {_explain(host, _last_line(log))}"
        if code in (126, 127):
            return f"could not be started: host {host} has no {self.python}: {SAME_PYTHON}"
        return how_it_ended(code)


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
    return ""


_REMEDIES = {
    "Host key verification failed": "add the host's key to known_hosts (ssh-keyscan), or, in a trusted network, write "
    "StrictHostKeyChecking no into ~/.ssh/config",
    "Permission denied": "the host accepts none of your keys: see --ssh-identity-file and ssh-copy-id",
    "Connection refused": "no ssh server listens there: see --ssh-port",
    "Could not resolve hostname": "this machine cannot resolve the name: check the list of hosts and ~/.ssh/config",
    "timed out": "the host does not answer: see --heartbeat-timeout",
    "No route to host": "this machine has no route to the host",
}


def _explain(host: str, message: str) -> str:
    """Return ssh's message, and what the user can do about it."""
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words in message), "")
    message = message or f"ssh {host} printed no message"
    return f"{message} ({remedy})" if remedy else message
