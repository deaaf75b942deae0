"""The driver's side of the job's replicated record: the votes of the agents that keep it, and the standbys.

The rules are in core/register.py. Without ``--standbys`` the only acceptor is the file on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from elasticstate.core.register import FEW, Candidate, Entry, Proposer, Quorum, choose_acceptors
from elasticstate.core.types import listed
from elasticstate.net import messages
from elasticstate.net.names import LOCALHOST, host_port


class ReplacedError(Exception):
    """A newer driver leads the job, or may lead it: this one must stop, and end nothing."""


class Votes:
    """The votes of agents on the entries of this driver."""

    def __init__(
        self, proposer: Proposer, file: str, is_replicated: bool, wake: Callable[[], None] = lambda: None
    ) -> None:
        """``file``: identity of the file on this machine. ``wake``: called when ``check`` raises from now on."""
        self.send: Callable[[str, messages.VoteRequest], None] = lambda *_: None  # to the agent with this identity
        self.is_replicated = is_replicated
        self.file = file
        self.proposer = proposer
        self._wake = wake
        self._changed = asyncio.Event()
        self._newer = ""  # who has replaced this driver
        self.is_waiting = False  # for a majority

    def wanted(self, connected: Callable[[], Sequence[Candidate]]) -> Quorum | None:
        """Return the set of acceptors that should replace the present one, or None."""
        if not self.is_replicated:
            return None
        candidates = connected()
        hosts = {candidate.host for candidate in candidates}
        if LOCALHOST not in hosts and len(hosts) < FEW:  # else an agent can keep the record
            candidates = [*candidates, Candidate(self.file, LOCALHOST)]
        best = choose_acceptors(self.proposer.present, candidates, len(hosts), self.file)
        return best if frozenset(best) != frozenset(self.proposer.present) else None

    def keepers(self) -> Quorum:
        """Return the acceptors that keep the record; none: the file on this machine alone."""
        return self.proposer.present if self.proposer.present != (self.file,) else ()

    def propose(self, value: bytes, wanted: Quorum | None) -> Entry:
        """Begin to write the next entry, and ask for the votes of all acceptors. Raises ReplacedError."""
        self.check()
        entry = self.proposer.write(value, wanted)
        for acceptor in entry.acceptors:
            self.send(acceptor, messages.Accept(entry))
        return entry

    def filed(self, entry: Entry) -> None:
        """Count the vote of the file on this machine."""
        self.proposer.accepted(self.file, entry.version)
        self._changed.set()

    def connected(self, acceptor: str) -> None:
        """Ask an agent again that has connected or reconnected."""
        entry = self.proposer.entry
        if entry is not None and acceptor in entry.acceptors:
            self.send(acceptor, messages.Accept(entry))

    def received(self, acceptor: str, message: messages.Vote) -> None:
        """Count the vote of an agent."""
        match message:
            case messages.Accepted(version):
                self.proposer.accepted(acceptor, version)
            case messages.VoteRefused(by):
                self.proposer.refused(by)
        self._changed.set()
        if self.proposer.is_lost:
            self._wake()

    def replaced(self, by: str) -> None:
        """Record that another driver leads the job: ``by`` tells which one."""
        self._newer = self._newer or by
        self._changed.set()
        self._wake()

    def check(self) -> None:
        """Raise ReplacedError if a newer driver leads the job, or may lead it."""
        if self._newer or self.proposer.is_lost:
            raise ReplacedError(self._newer or "a newer driver has asked the agents for their votes")

    def has(self, entry: Entry) -> bool:
        """Return True if this entry, or a newer one, can never be lost."""
        chosen = self.proposer.chosen
        return chosen is not None and chosen >= entry.version

    async def chosen(self, entry: Entry, limit_s: float) -> None:
        """Wait until this entry can never be lost. Raises ReplacedError, also if no majority answers in time."""
        try:
            self.is_waiting = True
            await self._chosen(entry, limit_s)
        finally:
            self.is_waiting = False

    async def _chosen(self, entry: Entry, limit_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + limit_s
        self.check()
        while not self.has(entry):
            self._changed.clear()
            left_s = deadline - asyncio.get_running_loop().time()
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({waiting}, timeout=max(0.0, left_s))
            waiting.cancel()
            self.check()
            if left_s <= 0:
                raise ReplacedError(
                    f"no majority of those that keep the record of this job has answered for {limit_s:g} s, so another "
                    "driver may lead it"
                )


class RecordOverview(Struct, frozen=True):
    """Hosts that keep the record of a job with ``--standbys``."""

    hosts: tuple[str, ...] = ()  # empty: the driver's machine alone
    standbys: tuple[str, ...] = ()  # hosts on which the next driver waits

    def line(self) -> str:
        """Return the losses that the job would survive."""
        if not self.hosts:
            return (
                "record: on the driver's machine alone, because fewer than two other hosts have agents: the job would "
                "not survive the loss of this machine"
            )
        count = (len(self.hosts) - 1) // 2
        then = f"a standby on {listed(list(self.standbys))}" if self.standbys else "elasticrun --reattach --listen"
        return (
            f"record: kept on {listed(list(self.hosts))}: the job would survive the loss of any {count} of them at a "
            f"time, and that of the driver's machine ({then} would continue it)"
        )


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
