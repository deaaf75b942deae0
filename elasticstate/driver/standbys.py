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
        self._known: dict[str, tuple[str, ...]] = {}  # by host: the addresses that its agent knows

    def known_to(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Return the hosts whose standby all agents of ``hosts`` would find: those that keep the record elect it."""
        known = [self._known.get(host, ()) for host in hosts]
        return tuple(host for host, address in self._addresses().items() if all(address in each for each in known))

    def _addresses(self) -> dict[str, str]:
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

    def host_joined(self, host: str) -> None:
        """Tell an agent that has connected."""
        if self._number:
            self._send(host, self._message())

    def known(self, host: str, addresses: tuple[str, ...]) -> None:
        """Note what the agent of a host knows."""
        self._known[host] = addresses

    def host_lost(self, host: str) -> None:
        """Forget the standby of a host: it may live, but another one is needed."""
        self._known.pop(host, None)
        self._failed.discard(host)
        if self._chosen.pop(host, ""):
            self._tell()

    def _tell(self) -> None:
        self._send_to_all(self._message())

    def _message(self) -> messages.Standbys:
        return messages.Standbys(tuple(self._addresses().values()))
