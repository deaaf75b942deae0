"""Digests of the replicated values of this rank's commits, by which the driver finds ranks that differ.

A commit gives a CRC-32C of each value without a further pass over its bytes. A digest covers the values that
data-parallel training keeps equal on all ranks (``State._replicates``). Digests are chained, so one that is sent now
and then covers all commits since the chain began, and a difference that one commit had and no later one shows, too::

    commits of ticks    1  2  3 ... 1023 | 1024 ...
    chain begins after  0                | 1024         at the first commit from each multiple of CHAIN_TICKS on
    sent                x  x     x     x      x         the first commit from each multiple of a stride on

The stride is a power of two that grows while commits are frequent. So ranks have digests in common even if their
strides differ. A rank that lacks a commit begins a new chain: digests of chains with different begins do not compare.

With ``--divergence restore`` each commit has a digest of its own, and a rank that lacks a commit says so.

The driver asks for what differs: for the digests of the last commits, then for the checksums of parts of the values of
one commit, until the parts are single values.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from elasticstate.commits import header_digest
from elasticstate.core.types import LACKED, MOST_PARTS, OUT_OF_INPUTS, DigestAnswer, DigestQuestion
from elasticstate.state.layout import number_of

CHAIN_TICKS = 1024
_MOST_COMMITS = 64  # whose values can be asked for
_MOST_BYTES = 1 << 20  # of their checksums
_LONGEST_NAME = 200

Checksums = np.ndarray[tuple[int], np.dtype[np.uint32]]


class Selection(NamedTuple):
    """The values that a digest covers, in the order of their bytes in a commit."""

    names: tuple[str, ...]
    forms: bytes  # digest of names, dtypes and shapes
    indices: Checksums | None  # among the checksums of a commit; None: all


class Compared(NamedTuple):
    """One commit as the driver may ask for it."""

    tick: int
    checksums: Checksums
    selection: Selection

    def digest(self) -> int:
        found = hashlib.blake2b(self.selection.forms + self.tick.to_bytes(8, "little"), digest_size=8)
        found.update(self.checksums.data)
        return _number(found)


class CommitDigests:
    """Chain of digests of one generation, and the checksums of its last commits.

    ``send``: sends a digest: the tick after which its chain begins, its own tick, and the digest. ``sends_each``: send
    that of each commit alone, at once. ``interval_s``: the longest time between two that are sent, if commits are
    frequent; the shortest is half of it.
    """

    def __init__(
        self,
        generation: int,
        send: Callable[[int, int, int], object],
        clock: Callable[[], float] = time.monotonic,
        sends_each: bool = False,
        interval_s: float = 1.0,
    ) -> None:
        self.generation = generation
        self._sends_each, self._send = sends_each, send
        self._clock, self._interval_s = clock, interval_s
        self._start = self._tick = self._sent = 0
        self._chain = hashlib.blake2b(digest_size=8)
        self._stride = 1
        self._sent_at = -interval_s
        self._last: deque[Compared] = deque(maxlen=_MOST_COMMITS)

    def add(self, tick: int, checksums: Checksums, selection: Selection) -> None:
        """Add the commit of a tick, given the checksums of all of its values. Safe on any thread if ``sends_each``."""
        chosen = checksums if selection.indices is None else checksums[selection.indices]
        self._last.append(added := Compared(tick, chosen, selection))
        if len(self._last) > 2 and len(self._last) * chosen.nbytes > _MOST_BYTES:
            self._last.popleft()
        if self._sends_each:
            self._tick = self._sent = tick
            self._send(tick - 1, tick, added.digest())
            return
        self._chain.update(selection.forms + tick.to_bytes(8, "little"))
        self._chain.update(chosen.data)
        last, self._tick = self._tick, tick
        if tick // self._stride != last // self._stride:
            self._adapt()
            self.send()
        if tick // CHAIN_TICKS != last // CHAIN_TICKS:
            self.restart(tick)

    def lack(self, tick: int, is_out: bool = False) -> None:
        """Note that this rank may lack the commit of this tick. ``is_out``: because it has no inputs."""
        if self._sends_each:
            self._send(tick - 1, tick, OUT_OF_INPUTS if is_out else LACKED)
        self.restart(tick)

    def restart(self, tick: int) -> None:
        """Begin a new chain after this tick."""
        self._start = self._tick = self._sent = tick
        self._chain = hashlib.blake2b(digest_size=8)

    def send(self) -> None:
        """Send the digest of the newest commit, if it was not sent."""
        if self._tick > self._sent:
            self._sent = self._tick
            self._send(self._start, self._tick, _number(self._chain))

    def _adapt(self) -> None:
        now = self._clock()
        since, self._sent_at = now - self._sent_at, now
        if since < self._interval_s / 2 and self._stride < CHAIN_TICKS:
            self._stride *= 2
        while since > self._interval_s and self._stride > 1:
            self._stride //= 2
            since /= 2

    def answer(self, question: DigestQuestion) -> DigestAnswer:
        """Answer the driver; without ``parts`` if the commit is not known any more."""
        tick, begin, end = question
        if not tick:
            return DigestAnswer(
                self.generation, question, tuple(n for found in list(self._last) for n in (found.tick, found.digest()))
            )
        found = next((each for each in list(self._last) if each.tick == tick), None)
        if found is None:
            return DigestAnswer(self.generation, question, ())
        names = found.selection.names
        end = end or len(names)
        if end - begin <= MOST_PARTS:
            shown = tuple(name[:_LONGEST_NAME] for name in names[begin:end])
            return DigestAnswer(self.generation, question, tuple(map(int, found.checksums[begin:end])), end, shown)
        size = -(-(end - begin) // MOST_PARTS)
        parts = (found.checksums[at : min(end, at + size)].tobytes() for at in range(begin, end, size))
        return DigestAnswer(self.generation, question, tuple(header_digest(part) >> 1 for part in parts), end)


NOTHING = Selection((), b"", np.zeros(0, dtype=np.uint32))
"""For commits without such values."""


def select(
    names: Sequence[Sequence[str]], form_of: Callable[[str], object], replicates: Callable[[str], bool]
) -> Selection | None:
    """Return the values to compare; None: there are none.

    Args:
        names: those of each value of a commit with bytes: several if they are tied.
        form_of: returns dtype and shape of a name.
        replicates: True for names of values that are equal on all ranks.
    """
    chosen = [i for i, of_value in enumerate(names) if all(map(replicates, of_value))]
    if not chosen:
        return None
    forms = number_of([(name, form_of(name)) for i in chosen for name in names[i]])
    indices = None if len(chosen) == len(names) else np.array(chosen, dtype=np.uint32)
    return Selection(tuple(names[i][0] for i in chosen), forms.to_bytes(8, "little"), indices)


def decode_question(generation: int, tick: int, both: int) -> tuple[int, DigestQuestion]:
    """Return the generation of a question on the control page, and the question."""
    return generation, DigestQuestion(tick, both >> 32, both & 0xFFFFFFFF)


def _number(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little") >> 1
