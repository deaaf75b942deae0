"""Launchers: how the agent of a host is started.

A launcher is a subclass of :class:`Launcher` with a name. ``--launcher`` chooses one for all hosts; without the option,
:class:`HostLaunchers` does. A package adds its own by an entry point in the group ``elasticstate.launchers``::

    [project.entry-points."elasticstate.launchers"]
    mycloud = "mypackage.hosts:MyCloudLauncher"

Most launchers need only a command that runs another command on a host: see launchers/command.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from elasticstate.errors import OptionError
from elasticstate.net.messages import Launch
from elasticstate.net.names import is_this_machine
from elasticstate.options import Options
from elasticstate.plug_ins import plug_in

GROUP = "elasticstate.launchers"
LAUNCHERS = {
    "local": "elasticstate.launchers.local_launcher:LocalLauncher",
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
    kind = plug_in("--launcher", GROUP, LAUNCHERS, name)
    if not (isinstance(kind, type) and issubclass(kind, Launcher)):
        raise OptionError(
            f"--launcher: {name!r}: the entry point does not name a subclass of elasticstate.launchers.Launcher. Mend "
            "its package."
        )
    return kind(options)
