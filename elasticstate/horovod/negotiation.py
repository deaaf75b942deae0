"""Headers: before each collective of the script, all ranks compare their next calls (docs/decisions/horovod.md).

First they compare one number, the fingerprint of their call. If it differs, or if a rank is in ``join()`` or has wrong
arguments, a header follows: the maximum over all ranks of a few numbers. Two of these are a digest of the call and its
negative: only if all ranks make the same call, they differ just in the sign. So no mismatched data is sent (except for
one in 2³¹ pairs of different calls, whose fingerprints are equal), and all ranks raise the same error. A rank in
``join()`` receives the others' call in the header, and takes part without data of its own.

Headers are sent in the default process group, the same on all ranks. Gradients have no headers of their own: the
optimizer's step has one, which describes all parameters. The end of a state's tick has a header only while a rank is
known to have joined. Every header contains the number of ticks.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

import elasticstate
from elasticstate.errors import CollectiveError
from elasticstate.extension import Channel, begin_call, end_call, ticks as ticks_of, world_generation
from elasticstate.horovod import timeline
from elasticstate.horovod.calls import Call, CallKind, CallUsageError, Members, failures_named

# --------------------------------------------------------------------------------------------------------------- offers
# Offers: what each rank can contribute next, if the calls of the ranks differ and some of them need not wait: the call
# that it is about to make, and its earlier asynchronous calls with names that other ranks have not made yet.


class Offered(NamedTuple):
    """A call of one rank."""

    key: str | None  # see Call.key
    digest: int
    text: str

    @classmethod
    def of(cls, call: Call) -> Offered:
        return cls(call.key, call.digest, call.lines[0])


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The calls of one rank."""

    next: Offered | None  # the call that it is about to make; None: it waits for one of ``earlier``
    yields: bool  # it goes on if ``next`` cannot be matched now
    earlier: list[Offered]  # its calls that are not matched yet

    @property
    def calls(self) -> list[Offered]:
        return [*self.earlier, *([self.next] if self.next is not None else [])]


class Decision(NamedTuple):
    """The decision of all ranks; without any of these, the ranks wait for calls that cannot be matched."""

    runs: int | None = None  # digest of a call that all ranks have made
    differs: str | None = None  # key of calls that all ranks have made, with different tensors or arguments
    some_yield: bool = False  # nothing can be matched, but some ranks go on


def decide(offers: Sequence[Offer]) -> Decision:
    """Return the decision, which depends only on the offers of all ranks."""
    first = offers[0].calls
    for call in first:
        if all(any(other.digest == call.digest for other in offer.calls) for offer in offers):
            return Decision(runs=call.digest)
    for call in first:
        if call.key is not None and all(any(other.key == call.key for other in offer.calls) for offer in offers):
            return Decision(differs=call.key)
    return Decision(some_yield=any(offer.yields for offer in offers))


_NEEDS_ALL = (
    "the call needs all ranks, but some are in join(). Make only calls of allreduce and barrier, and steps of "
    "optimizers, until all ranks have called join()."
)
_MARK_BYTES = 4
_MOST_RANKS = 8  # maximum number of ranks that an error lists for each call
_LENGTH = 11
_NOTHING = torch.iinfo(torch.int64).min  # neutral for the maximum
_HALF_BITS = 31
_HALF = (1 << _HALF_BITS) - 1
_NEEDS_HEADER = 1 << 2 * _HALF_BITS  # the fingerprint of a rank that is in join(), or whose arguments are wrong


class CallHeader(NamedTuple):
    """The next call of the ranks."""

    trains: int  # 1: at least one rank makes a call
    joined: int  # 1: at least one rank is in join()
    wrong: int  # 1: the arguments are wrong on at least one rank
    has_offers: int  # 1: at least one rank makes a call that need not wait, or has made one that is not matched yet
    ticks: int
    kind: int
    numbers: tuple[int, ...]
    digest: int
    differs: bool

    @property
    def fails(self) -> bool:
        return bool(self.wrong) or self.differs


_state: weakref.ref[elasticstate.State] | None = None  # the state in use by elastic.run
_joined_in = 0  # generation whose last header reported joined ranks
_waits = 0  # calls in which this process has waited until the others have come as far


def use(state: elasticstate.State | None) -> None:
    """Set the state whose ticks are counted; None: ``elastic.run`` has left the world."""
    global _state
    _state = weakref.ref(state) if state is not None else None


def state() -> elasticstate.State | None:
    return _state() if _state is not None else None


def ticks() -> int:
    """Return the number of completed ticks in this world."""
    present = state()
    return ticks_of(present) if present is not None else 0


def agree(call: Call, members: Members, yields: bool = False, is_done: Callable[[], bool] = lambda: False) -> bool:
    """Wait until all ``members`` that are not in ``join()`` make the same call.

    Return False instead, if the other ranks make other calls first and ``yields`` is True. Meanwhile earlier calls of
    this rank may be started; return True when ``is_done()``.

    Raises:
        CallUsageError: on all members that make a call, with the same message: their calls or tensors differ, some have
            wrong arguments, or some are in ``join()`` and the call needs all ranks.
        The errors of a collective.
    """
    global _joined_in, _waits
    try:
        if members.size == 1:
            if call.wrong:
                raise CallUsageError(f"{call.lines[0]}: {call.wrong}")
            return True
        while (header := _exchange(call, members, yields)) is not None and header.fails:
            if not header.has_offers or header.wrong or header.joined:
                raise CallUsageError(_explain(call, members))
            is_matched = _settle(call, members, yields)
            if is_done():
                return True
            if is_matched is not None:
                return is_matched
    finally:
        _waits += not yields
    if members.calls is not None:
        return True  # a process set: join() is refused
    has_joined = header is not None and bool(header.joined)
    _joined_in = world_generation() if has_joined else 0
    if has_joined and call.kind is CallKind.OTHER:
        raise CallUsageError(f"{call.lines[0]}: {_NEEDS_ALL}")
    return True


def _settle(call: Call, members: Members, yields: bool) -> bool | None:
    """Exchange offers, after the next calls of the ranks have differed, and do what the ranks decide.

    Return True if ``call`` is matched, False if it is not and this rank goes on, and None if it has to wait again.

    Raises CallUsageError if ``call`` differs between the ranks, or no rank can go on.
    """
    earlier = [Offered.of(late.call) for late in members.earlier.values()]
    own = Offer(None if call.is_wait else Offered.of(call), yields, earlier)
    with failures_named():
        offers = [
            msgspec.json.decode(text, type=Offer)
            for text in Channel(members.group, 0).messages_of_all(msgspec.json.encode(own))
        ]
    decision = decide(offers)
    if decision.runs is not None:
        if own.next is not None and own.next.digest == decision.runs:
            return True
        members.earlier.pop(next(offered.key or "" for offered in earlier if offered.digest == decision.runs)).start()
        return None
    if decision.differs is not None:
        of_key = [next(c.text for c in offer.calls if c.key == decision.differs).encode() for offer in offers]
        text = _difference(of_key, members)
        if own.next is not None and own.next.key == decision.differs:
            raise CallUsageError(text)
        members.earlier.pop(decision.differs).error = text
        return None
    if not decision.some_yield:
        raise CallUsageError(_explain(call, members))
    return False if yields else None


def some_have_joined() -> bool:
    """Return True if the last header reported a rank in ``join()``."""
    return _joined_in != 0 and _joined_in == world_generation()


def receive(members: Members) -> CallHeader | None:
    """Return, in ``join()``, the next call of the ranks that still train; None if no rank trains any more.

    If the calls of those ranks fail, they raise the error. This rank has helped to explain it, and has nothing to do.
    """
    global _joined_in
    _joined_in = 0
    header = _exchange(None, members)
    assert header is not None, "this rank needs it"
    if not header.trains:
        return None
    if header.fails:
        _explain(None, members)
    return header


def fingerprint(call: Call | None) -> int:
    """Return the fingerprint of this rank's next call (None: this rank is in ``join()``).

    It consists of 31 bits of the digest and of their complements: in the bitwise OR of two different fingerprints, a
    bit and its complement are both set.
    """
    if call is None or call.wrong or call.is_wait:
        return _NEEDS_HEADER
    half = call.digest & _HALF
    return half | (half ^ _HALF) << _HALF_BITS


def are_equal(own: int, union: int) -> bool:
    """Return True, on all ranks, if all make the same call. ``union``: the bitwise OR of their fingerprints."""
    return own == union != _NEEDS_HEADER


def _exchange(call: Call | None, members: Members, yields: bool = False) -> CallHeader | None:
    """Compare ``call`` (None: this rank is in ``join()``) with those of all members.

    Return None if all make the same call; else their header.
    """
    ranks = () if members.calls is None else members.ranks
    text = "join()" if call is None else call.lines[0]
    span = timeline.negotiate(call, ticks) if call is not None else None
    begin_call(members.generation, members.process_set, ranks, next(members.numbers), text)
    try:
        with failures_named():
            own = fingerprint(call)
            union = torch.tensor([own], dtype=torch.int64, device="cpu")
            dist.all_reduce(union, dist.ReduceOp.BOR, members.group)
            if are_equal(own, int(union.item())):
                return None
            return _send_header(call, members, yields or bool(members.earlier))
    finally:
        end_call()
        timeline.end(span)


def _send_header(call: Call | None, members: Members, has_offers: bool) -> CallHeader:
    """Send the header of ``call``, and return the header of all members."""
    numbers = [0, 1, *[_NOTHING] * (_LENGTH - 2)]
    if call is not None:
        padded = [*call.numbers, 0, 0, 0][:3]
        wrong = int(bool(call.wrong))
        numbers = [1, 0, wrong, int(has_offers), ticks(), call.kind, *padded, call.digest, -call.digest]
    header = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    dist.all_reduce(header, dist.ReduceOp.MAX, members.group)
    trains, joined, wrong, offers, of_ticks, kind, first, second, third, highest, lowest = header.tolist()
    numbers_of_call = first, second, third
    return CallHeader(trains, joined, wrong, offers, of_ticks, kind, numbers_of_call, highest, highest != -lowest)


def _explain(call: Call | None, members: Members) -> str:
    """Return the first line that differs between the members, with its text on each rank. All members call it."""
    channel = Channel(members.group, 0)
    lines = list(call.lines) if call is not None else []
    if call is not None and call.wrong:
        lines[0] += f": {call.wrong}"
    marks = channel.messages_of_all(b"".join(zlib.crc32(line.encode()).to_bytes(_MARK_BYTES, "big") for line in lines))
    at = _first_difference([mark for mark in marks if mark])
    shown = [*lines[:1], *(lines[at : at + 1] or ["nothing more"])] if at > 0 else lines[:1]
    texts = channel.messages_of_all(" with ".join(shown or ["join()"]).encode())
    return _difference([text if mark else b"" for mark, text in zip(marks, texts, strict=True)], members)


def _difference(texts: list[bytes], members: Members) -> str:
    """Return the error for the texts of the members' calls; b"": a member makes none."""
    given: dict[str, list[int]] = {}
    for rank, text in zip(members.ranks, texts, strict=True):
        if text:
            given.setdefault(text.decode(), []).append(rank)
    if len(given) == 1:
        return next(iter(given))  # the same mistake on all ranks
    calls = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in given.items())
    return (
        f"the ranks do not make the same call: {calls}. Make the same calls in the same order on all ranks, with the "
        f"same arguments and with tensors of the same dtype and shape."
    )


def _first_difference(marks: list[bytes]) -> int:
    """Return the index of the first line that differs between the ``marks``; 0 if all are equal."""
    for begin in range(0, max(map(len, marks)), _MARK_BYTES):
        if len({mark[begin : begin + _MARK_BYTES] for mark in marks}) > 1:
            return begin // _MARK_BYTES
    return 0


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


T = TypeVar("T")


class NameUse:
    """Use of a name by a call that has just started, also after its handle is dropped."""

    def __init__(self) -> None:
        self._waits = _waits
        self._is_over = False

    def end(self) -> None:
        """The script has learnt that the call has ended."""
        self._is_over = True

    def is_over(self) -> bool:
        """Return True if the name may be used again: after any later call that waits for the other ranks."""
        return self._is_over or _waits > self._waits


@dataclass(eq=False, repr=False)
class Handle(Generic[T]):
    """A started collective, for ``synchronize()`` and ``poll()``."""

    works: Sequence[Any]  # torch's handles
    finish: Callable[[], T]  # makes the output, after all works have ended
    generation: int  # of the world in which it runs
    span: timeline.Span | None = None  # its bar in the timeline
    parts: Sequence[Handle[Any]] = ()  # handles for which ``finish`` waits
    name_use: NameUse | None = field(default=None, init=False)
    _output: T | None = field(default=None, init=False)

    def is_done(self) -> bool:
        is_done = all(work.is_completed() for work in self.works) and all(part.is_done() for part in self.parts)
        if is_done and self.name_use is not None:
            self.name_use.end()
        return is_done

    def wait(self) -> T:
        """Return the output. Raises the collective's error; CollectiveError if its world is over."""
        global _waits
        if self._output is None:
            if world_generation() != self.generation:
                self.works = ()
                raise CollectiveError(
                    f"this collective was started in generation {self.generation}, which has ended. Start it again in "
                    f"the present world."
                )
            works, self.works = self.works, ()
            _waits += 1
            if self.name_use is not None:
                self.name_use.end()
            with failures_named():
                for work in works:
                    work.wait()
            with torch.no_grad():
                self._output = self.finish()
            timeline.end(self.span)
        return self._output


def together(handles: Sequence[Handle[T]], generation: int) -> Handle[list[T]]:
    """Return one handle for several collectives. Its output is the list of their outputs."""
    return Handle((), lambda: [handle.wait() for handle in handles], generation, parts=handles)


def synchronize(handle: Handle[T]) -> T:
    """Wait for a collective, and return its output. Later calls return the same object.

    Raises CollectiveError if a peer has failed, and for a handle of a world that is over.
    """
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Return True if ``synchronize(handle)`` would return immediately."""
    return handle.is_done()


# ------------------------------------------------------------------------------------------------------------- matching
# Start of a call: all ranks agree on it, or it waits for the ranks that make other calls first.
#
# As in Horovod, a name may be in use by one call of a function at a time. A second one raises an error on its rank.


def start(call: Call, members: Members, launch: Callable[[], Handle[T]], waits: bool) -> Handle[T]:
    """Return the handle of ``launch()``, after all ranks have agreed on ``call``.

    All members call ``launch`` at the same point. ``waits``: wait for the other ranks, even if they make other calls
    first. Otherwise, a call with a key may be launched later.

    Raises CallUsageError if the calls differ, and on this rank alone if the name is in use.
    """
    key = call.key if members.size > 1 else None
    if key is None:
        agree(call, members)
        return launch()
    _refuse_used_name(key, call, members)
    if agree(call, members, yields=not waits):
        return _launch(key, members, launch)
    late = LateHandle(key, call, members, launch)
    members.earlier[key] = late
    return late


class LateHandle(Handle[T], Generic[T]):
    """Handle of a call that other ranks make later. It starts in a later call of this rank."""

    def __init__(self, key: str, call: Call, members: Members, launch: Callable[[], Handle[T]]) -> None:
        super().__init__((), lambda: self._started().wait(), members.generation)
        self.call = call
        self._key = key
        self._members = members
        self._launch = launch
        self._handle: Handle[T] | None = None
        self.error = ""

    def start(self) -> None:
        self._handle = _launch(self._key, self._members, self._launch)

    def is_done(self) -> bool:
        """Return True if ``wait`` would return at once. Makes one exchange with the other ranks before the start."""
        if world_generation() != self.generation:
            return True  # and ``wait`` raises an error
        if self._is_waiting:
            agree(self._call_of("poll"), self._members, yields=True, is_done=lambda: not self._is_waiting)
        return bool(self.error) or (self._handle is not None and self._handle.is_done())

    def wait_for_start(self) -> None:
        """Wait until all ranks have made the call. An error of it is raised in ``wait``."""
        try:
            while self._is_waiting:
                agree(self._call_of("synchronize"), self._members, is_done=lambda: not self._is_waiting)
        except CallUsageError as error:
            self._members.earlier.pop(self._key, None)
            self.error = str(error)

    @property
    def _is_waiting(self) -> bool:
        return self._handle is None and not self.error

    def _call_of(self, function: str) -> Call:
        return Call(CallKind.OTHER, (f"{function}() of {self.call.lines[0]}",), is_wait=True)

    def _started(self) -> Handle[T]:
        self.wait_for_start()
        if self._handle is None:
            raise CallUsageError(self.error)
        return self._handle


def _launch(key: str, members: Members, launch: Callable[[], Handle[T]]) -> Handle[T]:
    handle = launch()
    members.running[key] = handle.name_use = NameUse()
    return handle


def _refuse_used_name(key: str, call: Call, members: Members) -> None:
    running = members.running.get(key)
    if running is not None and running.is_over():
        del members.running[key]
        running = None
    if running is not None or key in members.earlier:
        raise CallUsageError(
            f"{call.lines[0]}: an earlier call with this name is in progress on this rank. Call synchronize() on its "
            "handle first, or choose another name."
        )
