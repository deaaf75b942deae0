"""Offers: what each rank can contribute next, when the calls of the ranks differ and some of them need not wait.

An asynchronous call with a name may come later on another rank, after calls that the first rank makes later, as in
Horovod. So if the next calls differ, all ranks exchange their offers: the call that each is about to make, and those of
its earlier calls that other ranks have not made yet. All ranks then reach the same decision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elasticstate.horovod.calls import Call


class Offered(NamedTuple):
    """A call of one rank."""

    key: str | None  # see Call.key
    digest: int
    text: str

    @classmethod
    def of(cls, call: Call) -> Offered:
        return cls(call.key, call.digest, call.lines[0])


@dataclass(frozen=True)
class Offer:
    """The calls of one rank.

    Args:
        next: the call that it is about to make; None: it waits for one of ``earlier``.
        yields: it goes on if ``next`` cannot be matched now.
        earlier: its calls that are not matched yet.
    """

    next: Offered | None
    yields: bool
    earlier: Sequence[Offered]

    @property
    def calls(self) -> list[Offered]:
        return [*self.earlier, *([self.next] if self.next is not None else [])]

    def encode(self) -> bytes:
        return json.dumps([self.next, self.yields, list(self.earlier)]).encode()

    @classmethod
    def decode(cls, text: bytes) -> Offer:
        following, yields, earlier = json.loads(text)
        return cls(Offered(*following) if following else None, yields, [Offered(*call) for call in earlier])


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
