"""The driver's side of the job's replicated record: it asks the agents that keep it, and waits for a majority.

The rules are in core/register.py. Without ``--standbys`` the only acceptor is the file on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct

from elasticstate.core.register import FEW, Candidate, Entry, Proposer, Quorum, choose_acceptors
from elasticstate.core.types import listed
from elasticstate.net import messages
from elasticstate.net.names import LOCALHOST


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
        self._proposer = proposer
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
        best = choose_acceptors(self._proposer.present, candidates, len(hosts), self.file)
        return best if frozenset(best) != frozenset(self._proposer.present) else None

    def keepers(self) -> Quorum:
        """Return the acceptors that keep the record; none: the file on this machine alone."""
        return self._proposer.present if self._proposer.present != (self.file,) else ()

    @property
    def is_changing(self) -> bool:
        """Return True after an entry that needs majorities of two sets: another one has to follow."""
        return self._proposer.is_changing

    def propose(self, value: bytes, wanted: Quorum | None) -> Entry:
        """Begin to write the next entry, and ask for the votes of all acceptors. Raises ReplacedError."""
        self.check()
        entry = self._proposer.write(value, wanted)
        for acceptor in entry.acceptors:
            self.send(acceptor, messages.Accept(entry))
        return entry

    def filed(self, entry: Entry) -> None:
        """Count the vote of the file on this machine."""
        self._proposer.accepted(self.file, entry.version)
        self._changed.set()

    def connected(self, acceptor: str) -> None:
        """Ask an agent again that has connected or reconnected."""
        entry = self._proposer.entry
        if entry is not None and acceptor in entry.acceptors:
            self.send(acceptor, messages.Accept(entry))

    def received(self, acceptor: str, message: messages.Vote) -> None:
        """Count the vote of an agent."""
        match message:
            case messages.Accepted(version):
                self._proposer.accepted(acceptor, version)
            case messages.VoteRefused(by):
                self._proposer.refused(acceptor, by)
        self._changed.set()
        if self._proposer.is_lost:
            self._wake()

    def replaced(self, by: str) -> None:
        """Record that another driver leads the job: ``by`` tells which one."""
        self._newer = self._newer or by
        self._changed.set()
        self._wake()

    def check(self) -> None:
        """Raise ReplacedError if a newer driver leads the job, or may lead it."""
        if self._newer or self._proposer.is_lost:
            raise ReplacedError(self._newer or "a newer driver has asked the agents for their votes")

    def has(self, entry: Entry) -> bool:
        """Return True if this entry, or a newer one, can never be lost."""
        chosen = self._proposer.chosen
        return chosen is not None and chosen >= entry.version

    def missing(self) -> tuple[str, ...]:
        """Return the acceptors that have not accepted the newest entry."""
        return self._proposer.missing()

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
