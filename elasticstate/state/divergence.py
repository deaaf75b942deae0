"""Comparison of the ranks: names of their values before a sync, commits in a check, and digests of all commits."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from elasticstate.commits import header_digest
from elasticstate.core.ids import CommitId
from elasticstate.core.types import LACKED, MOST_PARTS, OUT_OF_INPUTS, DigestAnswer, DigestQuestion, listed
from elasticstate.errors import StateDivergedError, StateError
from elasticstate.log import logger
from elasticstate.state.layout import Checksums, number_of
from elasticstate.state.session import Channel
from elasticstate.state.values import Leaf, Moved, Row, Tree, comparable_bytes

Kinds = dict[str, bool]
"""For each value's name: True if the value is an object with ``state_dict()`` that a rank loads from the root's."""

MAX_NAMES = 20  # maximum number of names in each rank's report


class Exclusions:
    """Names of tensors and objects that differ by rank by design. A name covers all names below it."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._announced: set[str] = set()
        self._attached: tuple[str, ...] = ()

    def add(self, names: Iterable[str]) -> None:
        self._names.update(names)

    @property
    def number(self) -> int:
        """Number of names given so far."""
        return len(self._names)

    def leave_out(self, attached: tuple[str, ...]) -> None:
        """Leave out attached values, too, of which each rank has its own parts. They are not announced."""
        self._attached = attached

    def __contains__(self, name: object) -> bool:
        parents = itertools.accumulate(str(name).split("."), "{}.{}".format)
        excluded = self._names.union(self._attached)
        return bool(excluded) and any(parent in excluded for parent in parents)

    def announce(self) -> None:
        """Log each name once."""
        new = sorted(self._names - self._announced)
        self._announced.update(new)
        if new:
            more = f", {len(new) - MAX_NAMES} more" if len(new) > MAX_NAMES else ""
            names = ", ".join(new[:MAX_NAMES])
            logger.warning("check() skips values that differ by rank by design: %s%s", names, more)


class Comparable(Protocol):
    """Values of one rank, as ``Snapshot`` has those of its newest commit."""

    @property
    def newest(self) -> CommitId | None: ...
    def summary(self, left_out: Container[str] = ..., /) -> tuple[int, int, int]: ...
    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]: ...


def check(
    snapshot: Comparable, channel: Channel, rank: int, exclusions: Exclusions, difference: str | None = None
) -> None:
    """Compare the newest commits of all ranks, except ``exclusions``, by one collective over five numbers of each rank.

    If these differ, rank 0 sends the checksum of each tensor and object to the others, and each rank reports its
    differences to all. ``difference``: text for the message; None: that of different commits.

    Raises StateDivergedError, with the same message on all ranks; StateError if no rank has a commit.
    """
    if rank == 0:
        exclusions.announce()
    own = snapshot.newest
    summary = snapshot.summary(exclusions) if own is not None else (0, 0, 0)
    rows = channel.numbers_of_all([*(own or CommitId(-1, -1)), *summary])
    commits = [CommitId(*row[:2]) if row[0] >= 0 else None for row in rows]
    if set(commits) == {None}:
        raise StateError("No rank holds a commit to check. Call commit() before check().")
    if len(set(commits)) > 1:
        held = _groups({rank: str(commit or "none") for rank, commit in enumerate(commits)})
        raise StateDivergedError(f"Ranks hold different commits: {held}. Call check() after the same tick on each.")
    if all(row == rows[0] for row in rows):
        return
    mine = {name: value for name, value in _fingerprints(snapshot).items() if name not in exclusions}
    if rank == 0:
        channel.send(msgspec.msgpack.encode(mine))
    theirs = mine if rank == 0 else msgspec.msgpack.decode(channel.receive(), type=dict[str, str])
    others = {name: mine.get(name, "") for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)}
    first = dict(list(others.items())[:MAX_NAMES])
    messages = channel.messages_of_all(msgspec.msgpack.encode((len(others), first)))
    reports = [msgspec.msgpack.decode(message, type=tuple[int, dict[str, str]]) for message in messages]
    if any(count for count, _ in reports):
        difference = difference or f"Ranks committed different values as {commits[0]}"
        raise StateDivergedError(_text(difference, [names for _, names in reports], max(n for n, _ in reports)))


def _text(difference: str, reports: list[dict[str, str]], count: int) -> str:
    names: dict[str, dict[int, str]] = defaultdict(lambda: dict.fromkeys(range(len(reports)), "as on rank 0"))
    for rank, report in enumerate(reports):
        for name, fingerprint in report.items():
            names[name][rank] = fingerprint
    shown = "; ".join(f"{name}: {_groups(by_rank, named=False)}" for name, by_rank in sorted(names.items()))
    more = f"; {count - MAX_NAMES} more" if count > MAX_NAMES else ""
    return (
        f"{difference}. {shown}{more}. Make them equal on all ranks, or exclude values "
        f"that differ by design: state.exclude_from_check(name)."
    )


def _groups(by_rank: dict[int, str], named: bool = True) -> str:
    """Return the ranks grouped by equal values, as text: ``rank 0 | ranks 1, 2``."""
    groups: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(value, []).append(rank)
    texts = []
    for value, ranks in groups.items():
        who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        texts.append(f"{value} on {who}" if named else who)
    return (", " if named else " | ").join(texts)


def _fingerprints(snapshot: Comparable) -> dict[str, str]:
    """Return a text for each tensor and object of the newest commit. Equal values have equal texts."""
    tensors, objects = snapshot.details()
    found = {name: f"{dtype}{list(shape)} {value:08x}" for name, (dtype, shape, value) in tensors.items()}
    for name, value in objects.items():
        for path, fingerprint in _object_fingerprints(name, value):
            found[path] = found.get(path, "") + fingerprint
    return found


def _object_fingerprints(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Tree):
        yield from _object_fingerprints(path, value.tree)
    elif isinstance(value, Leaf | Row | Moved):
        return  # the tensors have fingerprints of their own, and places are no values
    elif type(value) is dict and value and all(isinstance(key, str | int) for key in value):
        for key, item in value.items():
            yield from _object_fingerprints(f"{path}.{key}", item)
    elif type(value) in (list, tuple) and 0 < len(value) <= MAX_NAMES:
        for i, item in enumerate(value):
            yield from _object_fingerprints(f"{path}.{i}", item)
    else:
        yield path, hashlib.blake2b(comparable_bytes(value), digest_size=8).hexdigest()


def find_refused(channel: Channel, ranks: Sequence[int], root: int, kinds: Kinds, has_commit: bool) -> dict[int, str]:
    """Compare the value names of the root with those of the ranks that get its state, before anything is sent.

    Return the text of the error for each rank that cannot take part in the sync, the same on all ``ranks``: these are
    all of them if the root has no commit, as the job has not trained yet; in a running job the ranks that differ from
    the root, because the error of a newcomer must not end the other workers.

    Args:
        channel: of ``ranks``, which are ascending. If all are equal, it has one small collective.
        kinds: those of this rank.
        has_commit: True if this rank holds a commit. Only the root's answer counts.
    """
    numbers = channel.numbers_of_all([number_of(sorted(kinds.items()))])
    if all(row == numbers[0] for row in numbers):
        return {}
    messages = channel.messages_of_all(msgspec.msgpack.encode((kinds, has_commit)))
    states = {
        rank: msgspec.msgpack.decode(message, type=tuple[Kinds, bool])
        for rank, message in zip(ranks, messages, strict=True)
    }
    expected, is_running = states[root]
    different: dict[str, list[int]] = {}
    for rank, (found, _) in states.items():
        for difference in _differences(expected, found, root, is_running):
            different.setdefault(difference, []).append(rank)
    if not different:
        return {}
    parts = listed((_on_ranks(difference, of) for difference, of in different.items()), "; ")
    text = (
        f"Ranks have states of different values: {parts}. Construct the state with the same names and kinds of values "
        "on every rank."
    )
    refused = itertools.chain(*different.values()) if is_running else ranks
    return dict.fromkeys(sorted(refused), text)


def _differences(expected: Kinds, found: Kinds, root: int, is_running: bool) -> Iterator[str]:
    """Yield texts that ``_on_ranks`` completes with the ranks that differ in this way.

    In a running job, the root may have replaced an object by a plain value: then the newcomer's is replaced, too. The
    opposite is a difference, as a plain value cannot load the state of an object.
    """
    if lacking := [name for name in expected if name not in found]:
        yield f"{{who}} {{lack}} {listed(map(repr, lacking))}, which rank {root} has"
    if surplus := [name for name in found if name not in expected]:
        yield f"{{who}} {{have}} {listed(map(repr, surplus))}, which rank {root} lacks"
    for name in expected:
        if name in found and found[name] != expected[name] and (expected[name] or not is_running):
            yield f"{name!r} is {_kind(found[name])} on {{who}}, and {_kind(expected[name])} on rank {root}"


def _on_ranks(difference: str, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return difference.format(who=f"rank {ranks[0]}", lack="lacks", have="has")
    return difference.format(who=f"ranks {listed(map(str, ranks))}", lack="lack", have="have")


def _kind(has_state_dict: bool) -> str:
    return "an object with state_dict()" if has_state_dict else "a value without state_dict()"


# ---------------------------------------------------------------------------------------------------- commit digests
# Digests of the replicated values of this rank's commits, by which the driver finds ranks that differ.
#
# A commit gives a CRC-32C of each value without a further pass over its bytes. A digest covers the values that
# data-parallel training keeps equal on all ranks (``State._replicates``). Digests are chained, so one that is sent now
# and then covers all commits since the chain began, and a difference that one commit had and no later one shows, too::
#
#     commits of ticks    1  2  3 ... 1023 | 1024 ...
#     chain begins after  0                | 1024         at the first commit from each multiple of CHAIN_TICKS on
#     sent                x  x     x     x      x         the first commit from each multiple of a stride on
#
# The stride is a power of two that grows while commits are frequent. So ranks have digests in common even if their
# strides differ. A rank that lacks a commit begins a new chain: digests of chains with different begins do not compare.
#
# With ``--divergence restore`` each commit has a digest of its own, and a rank that lacks a commit says so.
#
# The driver asks for what differs: for the digests of the last commits, then for the checksums of parts of the values
# of one commit, until the parts are single values.


CHAIN_TICKS = 1024
_MOST_COMMITS = 64  # whose values can be asked for
_MOST_BYTES = 1 << 20  # of their checksums
_LONGEST_NAME = 200


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
