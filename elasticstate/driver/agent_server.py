"""The addresses where agents connect, and the warnings of refused connections."""

from __future__ import annotations

from collections.abc import Callable

from elasticstate.driver.counted_lines import CountedLines
from elasticstate.errors import OptionError
from elasticstate.machine import version
from elasticstate.net.control import ControlServer, Owner
from elasticstate.net.names import LOCALHOST, own_addresses
from elasticstate.net.strangers import Strangers
from elasticstate.net.trust import Trust
from elasticstate.options import Options
from elasticstate.options.kinds import split_address


class AgentServer:
    """The driver's server for agents. ``owner`` gets their messages."""

    def __init__(
        self,
        options: Options,
        token: str,
        owner: Owner,
        warn: Callable[[str], None],
        log: Callable[[str], None],
        strangers: Strangers | None,
    ) -> None:
        self._options = options
        self._server = ControlServer(Trust(token), options.connect_timeout_s, owner, version(), strangers)
        self._log = log
        self.refused = CountedLines(warn).refused
        self.is_open = False  # for other hosts
        self.ports: tuple[int, ...] = ()
        self.addresses: tuple[str, ...] = ()

    def listen(self, job: str, ports: tuple[int, ...]) -> None:
        """Listen on the previous driver's ``ports``, or on any. Raises OptionError."""
        if self._options.listen is not None:
            self._listen_for_hosts(*split_address(self._options.listen))
        try:
            self.ports = (self._server.listen(LOCALHOST, *ports[:1]),)
            self.addresses = (f"{LOCALHOST}:{self.ports[0]}",)
            if ports[1:]:
                self.open(ports[1])
        except OSError as error:
            raise OptionError(
                f"--job-name: {job!r}: its agents connect to the ports {', '.join(map(str, ports))}, and the driver "
                f"cannot listen there ({error.strerror}). Stop the process that uses these ports."
            ) from None

    def _listen_for_hosts(self, host: str, port: int) -> None:
        """Listen for agents that dial in (``--listen``): each of them is a host. Raises OptionError."""
        try:
            port = self._server.listen(host, port)
        except OSError as error:
            raise OptionError(
                f"--listen: {self._options.listen!r}: {error.strerror}. Give an address of this machine and a free "
                "port."
            ) from None
        self.is_open = True
        shown = host if host not in ("0.0.0.0", "::") else next(iter(own_addresses()), LOCALHOST)
        command = f"elasticrun agent --join {shown}:{port} --token-file {self._options.token_file}"
        self._log(f"waiting for agents: run {command} on each host")

    def open(self, port: int = 0) -> None:
        """Listen for other hosts, too. Call this before the first agent is started. Raises OSError."""
        port = self._server.listen("0.0.0.0", port)
        self.ports = (self.ports[0], port)
        self.addresses = tuple(f"{address}:{port}" for address in (*own_addresses(), LOCALHOST))
        self.is_open = True

    async def stop(self) -> None:
        await self._server.stop()
