"""Start of agents by a command, such as ssh or srun, that runs another command on a host and passes its stdin on."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate import processes
from elasticstate.errors import OptionError
from elasticstate.failures import how_it_ended
from elasticstate.launchers import AGENT, Launcher, send_parameters
from elasticstate.net.messages import Launch
from elasticstate.options import Options, slurm_allocation
from elasticstate.processes import ask

SAME_PYTHON = "install it there at this path, or start the agents there with elasticrun agent (see --listen)"
"""Remedy if a host has no Python, with elasticstate, at the path of this one."""


class CommandLauncher(Launcher):
    """Launcher with a command. A subclass has at least the method :meth:`command`."""

    python = sys.executable
    """The path of the Python that runs agents; a subclass may have another one."""

    def command(self, host: str, arguments: Sequence[str], log: Path, name: str) -> list[str]:
        """Return the command that runs Python with these ``arguments`` on a host.

        It passes stdin, stdout and stderr on, and ends when Python ends. It may write messages of its own to ``log``.
        ``name``: unique for each call.
        """
        raise NotImplementedError

    def how_ended(self, host: str, code: int, log: Path) -> str:
        """Return how the command ended, and what the user can do about it."""
        return how_it_ended(code)

    def start(self, launch: Launch, log: Path) -> CommandAgent:
        return CommandAgent(self, launch, log)

    async def clear(self, host: str, name: str) -> None:
        """End what may remain after the command of this ``name`` was killed. Nothing, unless a subclass knows how."""


class CommandAgent:
    """An agent on another host, and the command that started it and carries its output."""

    is_local = False

    def __init__(self, launcher: CommandLauncher, launch: Launch, log: Path) -> None:
        """Start the command. Raises OSError if that fails."""
        self._launcher = launcher
        self._launch = launch
        self._was_killed = False
        self._log = log  # the command's own messages go here, apart from the workers' output
        log.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            launcher.command(launch.host, ("-m", AGENT), log, launch.agent),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the driver
        )
        send_parameters(self._process, launch)

    async def ended(self) -> str:
        await processes.ended_child(self._process.pid)
        return self._launcher.how_ended(self._launch.host, self._process.wait(), self._log)

    def kill(self) -> None:
        """End the command. An agent that still lives has received Shutdown, or gives up without its driver."""
        if self._process.returncode is None:
            self._process.kill()
            self._was_killed = True

    async def clear(self) -> None:
        if self._was_killed:
            await self._launcher.clear(self._launch.host, self._launch.agent)


# ------------------------------------------------------------------------------------------------------------------ ssh


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


# ---------------------------------------------------------------------------------------------------------------- slurm
# Agents in steps of a Slurm allocation: one srun for each node, so that the loss of a node ends no other step.


_LIMIT_S = 10.0  # of each command


class SrunLauncher(CommandLauncher):
    """Launcher by srun, inside an allocation. A step may use all that the allocation has on its node."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        allocation = slurm_allocation()
        if allocation is None:
            raise OptionError(
                "--launcher: 'slurm': this process runs in no allocation of Slurm. Run elasticrun inside salloc or "
                "sbatch, or leave --launcher out."
            )
        self._job_id = allocation.job_id

    def refuse(self, host: str) -> str:
        return "" if shutil.which("srun") else "this machine has no srun. Install Slurm's client programs"

    def command(self, host: str, arguments: Sequence[str], log: Path, name: str) -> list[str]:
        return [
            *("srun", f"--jobid={self._job_id}", f"--nodelist={host}", "--nodes=1", "--ntasks=1"),
            "--overlap",  # with the steps of this node's earlier agent, and those of the user
            "--no-kill",
            "--mpi=none",
            "--cpu-bind=none",  # each worker may use all CPUs of the allocation
            "--unbuffered",
            "--quiet",
            "--chdir=/",  # no file of the user's directory hides a module of the agent
            f"--job-name={name}",
            *(self.python, *arguments),
        ]

    async def clear(self, host: str, name: str) -> None:
        """End the step, which has lost its srun. Slurm itself does so later, or never."""
        with suppress(OSError, TimeoutError):
            answer = await ask(f"squeue --steps --noheader --jobs={self._job_id} --format='%i %j'", _LIMIT_S)
            for step in (line.split()[0] for line in answer.stdout.splitlines() if line.split()[1:] == [name]):
                await ask(f"scancel --signal=KILL {step}", _LIMIT_S)
