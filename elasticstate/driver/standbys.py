"""The standbys of a job: on which hosts they run, and where the next driver may listen."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elasticstate.core.register import Candidate
from elasticstate.net import messages
from elasticstate.net.names import LOCALHOST, host_port


class Standbys:
    """Standbys on ``number`` hosts, if so many other hosts have agents. All agents get their addresses."""

    def __init__(
        self,
        number: int,
        send: Callable[[str, messages.ToAgent], None],
        send_to_all: Callable[[messages.ToAgent], None],
        warn: Callable[[str], None],
    ) -> None:
        self._number = number
        self._send, self._send_to_all, self._warn = send, send_to_all, warn
        self._chosen: dict[str, str] = {}  # by host: the address; "": not known yet
        self._failed: set[str] = set()

    def addresses(self) -> dict[str, str]:
        """Return the addresses, by host."""
        return {host: address for host, address in self._chosen.items() if address}

    def look(self, candidates: Callable[[], Iterable[Candidate]]) -> None:
        """Start those that are missing, on the hosts of the agents that have joined first."""
        for candidate in candidates() if len(self._chosen) < self._number else ():
            host = candidate.host
            if len(self._chosen) < self._number and host not in (LOCALHOST, *self._chosen, *self._failed):
                self._chosen[host] = ""
                self._send(host, messages.RunStandby())

    def received(self, host: str, message: messages.StandbyListens, address: str) -> None:
        """Tell all agents of a standby that listens, or listens no more. ``address``: of the host."""
        if message.port:
            self._chosen[host] = host_port(address, message.port)
        else:
            self._warn(f"the standby on host {host} {message.reason}")
            self._failed.add(host)
            self._chosen.pop(host, None)
        self._tell()

    def host_lost(self, host: str) -> None:
        """Forget the standby of a host: it may live, but another one is needed."""
        self._failed.discard(host)
        if self._chosen.pop(host, ""):
            self._tell()

    def _tell(self) -> None:
        self._send_to_all(messages.Standbys(tuple(self.addresses().values())))
