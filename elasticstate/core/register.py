"""A replicated register: one value that a majority of acceptors keeps, and that only the newest leader can change.

The algorithm is CASPaxos (Rystsov 2018, arXiv 1802.07000) with a leader that stays. The set of acceptors changes by
joint quorums, as in Raft (Ongaro and Ousterhout 2014, section 6). Pure: no clock, no randomness, no messages.

::

    a new driver                                   acceptors
      begin(number)       ── prepare(ballot) ──►   prepare(vote, ballot)
      promised, refused   ◄── promise, accepted ── the newest vote, kept before the answer
      is_leader: learned.value is the newest value
      write(value)        ── entry ────────────►   accept(vote, entry)
      accepted, refused   ◄── version, or promised ballot
      chosen: the value may take effect

An acceptor that has lost its memory must come back with another identity. A driver must have another identity than all
earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

FILE = "file"
"""Identity of the acceptor on the disk of the machine on which the job began.

Each file is an acceptor of its own: a driver on another machine gives its file another identity, kept with the file.
"""

FEW, MANY = 3, 5  # acceptors: one of three may be lost, two of five
HOSTS_FOR_MANY = 50

Quorum = tuple[str, ...]
"""A set of acceptors, of which a majority is needed."""


class Ballot(NamedTuple):
    """Right to write, of one driver. ``number`` is the epoch of the job once the driver leads."""

    number: int
    proposer: str


class Version(Struct, frozen=True, order=True, array_like=True):
    """Version of the value. A leader numbers its entries from 1."""

    ballot: Ballot
    index: int


class Entry(Struct, frozen=True, array_like=True):
    """Content of the register. ``quorums``: one set of acceptors, or the old and the new one while the set changes.

    The entry is chosen when a majority of *each* set has accepted it, or a newer entry of the same leader.
    """

    version: Version
    quorums: tuple[Quorum, ...]
    value: bytes

    @property
    def acceptors(self) -> Quorum:
        """All acceptors that the entry is sent to."""
        return tuple(dict.fromkeys(acceptor for quorum in self.quorums for acceptor in quorum))


class Vote(Struct, frozen=True, array_like=True):
    """The whole memory of an acceptor. It must be kept before the answer is sent."""

    promised: Ballot | None = None
    accepted: Entry | None = None


# ----------------------------------------------------------------------------------------------------------- acceptors


def prepare(vote: Vote, ballot: Ballot) -> tuple[Vote, bool]:
    """Promise to accept nothing of a lower ballot. False: refused, because of ``vote.promised``.

    An acceptor promises each number to one proposer, as a term of Raft has one vote: no two leaders have one number.
    """
    if vote.promised is not None and ballot != vote.promised and ballot.number <= vote.promised.number:
        return vote, False
    return Vote(ballot, vote.accepted), True


def accept(vote: Vote, entry: Entry) -> tuple[Vote, bool]:
    """Accept an entry. False: refused, because of ``vote.promised``, or because a newer entry came before this one."""
    if vote.promised is not None and entry.version.ballot < vote.promised:
        return vote, False
    if vote.accepted is not None and entry.version < vote.accepted.version:
        return vote, False
    return Vote(entry.version.ballot, entry), True


# ----------------------------------------------------------------------------------------------------------- proposers


class _Run(NamedTuple):
    """Successive entries of a leader with the same quorums, from this index on."""

    first: int
    quorums: tuple[Quorum, ...]


class Proposer:
    """A driver that wants to lead, and writes once it leads. Each driver has an identity of its own.

    A proposer that is refused before it leads begins again with a higher number. A leader never begins again: if it is
    refused, another driver may lead.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.ballot: Ballot | None = None
        self.highest_refusal: Ballot | None = None  # the highest ballot that an acceptor has named in a refusal
        self.learned: Entry | None = None  # the newest entry among the promises; of a leader, where it began
        self.is_lost = False  # another driver may lead: this leader must stop
        self.entry: Entry | None = None  # the newest own one
        self.chosen: Version | None = None  # the newest own one: it and all older ones may take effect
        self._leads = False
        self._promised: frozenset[str] = frozenset()
        self._accepted: dict[str, int] = {}  # the newest own index that each acceptor has
        self._base: tuple[Quorum, ...] = ()  # where the next entry starts: two sets if these must be completed first
        self._runs: tuple[_Run, ...] = ()  # from that of the chosen entry on

    @classmethod
    def first(cls, identity: str, number: int = 1, file: str = FILE) -> Proposer:
        """Return the leader of a new job, of which no acceptor but the driver's own file can know."""
        proposer = cls(identity)
        proposer.ballot = Ballot(number, identity)
        proposer._leads, proposer._base = True, ((file,),)
        return proposer

    # -------------------------------------------------------------------------------------------------------- phase 1

    def begin(self, number: int) -> Ballot:
        """Ask for the right to write, with a higher number than before. Return the ballot to send to all acceptors."""
        if self._leads:
            raise RuntimeError("a leader never begins again")
        if self.ballot is not None and number <= self.ballot.number:
            raise ValueError(f"number {number} is not higher than {self.ballot.number}")
        self.ballot = Ballot(number, self.identity)
        self.learned, self._promised = None, frozenset()
        return self.ballot

    def promised(self, acceptor: str, ballot: Ballot, accepted: Entry | None) -> None:
        """Note a promise, and the entry that came with it."""
        if ballot != self.ballot or self._leads:  # late: what a leader learns no longer counts
            return
        self._promised |= {acceptor}
        if accepted is not None and (self.learned is None or accepted.version > self.learned.version):
            self.learned = accepted
        if self.learned is None or self.learned.version.ballot.number >= ballot.number:
            return
        is_refused = self.highest_refusal is not None and self.highest_refusal > ballot
        if not is_refused and all(_has_majority(quorum, self._promised) for quorum in self.learned.quorums):
            self._leads, self._base = True, self.learned.quorums

    def refused(self, by: Ballot) -> None:
        """Note that an acceptor has refused a ballot or an entry, because it has promised another ballot."""
        if self.highest_refusal is None or by > self.highest_refusal:
            self.highest_refusal = by
        if self._leads and self.ballot is not None and by > self.ballot:
            self.is_lost = True

    @property
    def is_leader(self) -> bool:
        """True if the proposer may write. Nothing takes effect, the new epoch included, before its first entry is
        chosen."""
        return self._leads and not self.is_lost

    @property
    def next_number(self) -> int:
        """The lowest number with which ``begin`` may succeed, as far as the proposer knows."""
        learned = self.learned and self.learned.version.ballot
        return 1 + max(
            ballot.number for ballot in (self.ballot, self.highest_refusal, learned, Ballot(0, "")) if ballot
        )

    # -------------------------------------------------------------------------------------------------------- phase 2

    def write(self, value: bytes, wanted: Quorum | None = None) -> Entry:
        """Return the next entry, to send to all its acceptors. It supersedes the one before, chosen or not.

        ``wanted``: the set of acceptors to change to, in two entries or more; None: what was wanted before. The change
        has ended when an entry with this set alone is chosen (``is_changing`` is False).
        """
        if not self.is_leader or self.ballot is None:
            raise RuntimeError("only a leader writes")
        quorums = self._base
        if len(quorums) == 1:  # otherwise this leader has learned a change, which somebody may have completed
            wanted = self.present if wanted is None else wanted
            if not wanted or len(set(wanted)) < len(wanted):
                raise ValueError(f"no set of acceptors: {wanted}")
            if set(wanted) != set(quorums[0]):
                quorums = (quorums[0], wanted)
        index = 1 if self.entry is None else self.entry.version.index + 1
        if not self._runs or self._runs[-1].quorums != quorums:
            self._runs += (_Run(index, quorums),)
        self.entry = Entry(Version(self.ballot, index), quorums, value)
        return self.entry

    def accepted(self, acceptor: str, version: Version) -> None:
        """Note that an acceptor has accepted an entry."""
        if self.entry is None or version.ballot != self.ballot:
            return
        self._accepted = {**self._accepted, acceptor: max(version.index, self._accepted.get(acceptor, 0))}
        following = self.entry.version.index + 1
        for place in reversed(range(len(self._runs))):
            first, quorums = self._runs[place]
            index = min(following - 1, *(self._reached(quorum) for quorum in quorums))
            if index >= first:
                self._choose(index, place)
                return
            following = first

    def _reached(self, quorum: Quorum) -> int:
        """Return the newest own index that a majority of the quorum has reached."""
        reached = sorted((self._accepted.get(acceptor, 0) for acceptor in quorum), reverse=True)
        return reached[len(quorum) // 2]

    def _choose(self, index: int, place: int) -> None:
        """Note that an entry of a run is chosen. An older change than the newest one is not left: it was given up."""
        assert self.entry is not None
        self.chosen = Version(self.entry.version.ballot, index)
        self._runs = self._runs[place:]
        if len(self._runs) == 1:
            self._base = self._runs[0].quorums[-1:]

    @property
    def present(self) -> Quorum:
        """The set of acceptors of the newest entry; during a change, the new set."""
        quorums = self.entry.quorums if self.entry is not None else self._base
        return quorums[-1] if quorums else ()

    @property
    def is_changing(self) -> bool:
        """True if the newest entry, own or learned, has two sets. Once it is chosen, another write ends the change."""
        return len(self.entry.quorums if self.entry is not None else self._base) > 1

    def missing(self) -> Quorum:
        """Return the acceptors that have not accepted the newest entry; before, those that have not promised."""
        if self.entry is not None:
            index, has = self.entry.version.index, self._accepted
            return tuple(acceptor for acceptor in self.entry.acceptors if has.get(acceptor, 0) < index)
        if self.learned is not None and not self._leads:
            return tuple(acceptor for acceptor in self.learned.acceptors if acceptor not in self._promised)
        return ()


def _has_majority(quorum: Quorum, acceptors: frozenset[str]) -> bool:
    return sum(acceptor in acceptors for acceptor in quorum) > len(quorum) // 2


# -------------------------------------------------------------------------------------------------- set of acceptors


class Candidate(NamedTuple):
    """A connected agent: its identity as an acceptor, its host, and the rack of its host ("": not known)."""

    acceptor: str
    host: str
    rack: str = ""


def choose_acceptors(present: Quorum, candidates: Sequence[Candidate], hosts: int, file: str = FILE) -> Quorum:
    """Return the set of acceptors that a leader should change to: agents on distinct hosts, or its own file alone.

    ``candidates``: the oldest first. ``hosts``: of the job. Present acceptors stay while they are connected. The others
    come from racks that have none, where racks are known, and are the oldest.
    """
    distinct = len({candidate.host for candidate in candidates})
    if distinct < FEW:
        return (file,)
    count = MANY if hosts >= HOSTS_FOR_MANY and distinct >= MANY else FEW
    chosen: list[Candidate] = []
    preferences: tuple[Callable[[Candidate], bool], ...] = (
        lambda candidate: candidate.acceptor in present,
        lambda candidate: candidate.rack not in {other.rack for other in chosen if other.rack},
        lambda candidate: True,
    )
    for is_preferred in preferences:
        for candidate in candidates:
            is_free = candidate.host not in {other.host for other in chosen}
            if len(chosen) < count and is_free and is_preferred(candidate):
                chosen.append(candidate)
    acceptors = tuple(candidate.acceptor for candidate in chosen)
    return present if set(acceptors) == set(present) else acceptors
