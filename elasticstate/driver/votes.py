"""The driver's side of the job's replicated record: it asks the agents that keep it, and waits for a majority.

The rules are in core/register.py. Without ``--standbys`` the only acceptor is the file on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from elasticstate.core.register import Candidate, Entry, Proposer, Quorum, choose_acceptors
from elasticstate.net import messages


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

    def wanted(self, candidates: Sequence[Candidate]) -> Quorum | None:
        """Return the set of acceptors that should replace the present one, or None."""
        if not self.is_replicated:
            return None
        hosts = len({candidate.host for candidate in candidates})
        best = choose_acceptors(self._proposer.present, candidates, hosts, self.file)
        return best if frozenset(best) != frozenset(self._proposer.present) else None

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

    async def chosen(self, entry: Entry) -> None:
        """Wait until this entry can never be lost. Raises ReplacedError."""
        self.check()
        while not self.has(entry):
            self._changed.clear()
            await self._changed.wait()
            self.check()
