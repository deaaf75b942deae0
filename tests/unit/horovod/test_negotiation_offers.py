from __future__ import annotations

import msgspec

from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.negotiation import (
    Decision,
    Offer,
    Offered,
    decide,
)


def offered(name: str, form: str = "float32[1]") -> Offered:
    return Offered.of(Call(CallKind.OTHER, (f"allreduce(name={name!r}) of {form}",), name=name, is_unique=True))


BARRIER = Offered.of(Call(CallKind.BARRIER, ("barrier()",)))
X, Y = offered("x"), offered("y")


def test_an_offer_travels() -> None:
    for offer in (Offer(None, False, [X]), Offer(Y, True, []), Offer(BARRIER, False, [X, Y])):
        assert msgspec.json.decode(msgspec.json.encode(offer), type=Offer) == offer


def test_a_call_that_all_ranks_have_made_runs() -> None:
    assert decide([Offer(BARRIER, False, [X]), Offer(X, True, [])]).runs == X.digest
    assert decide([Offer(Y, True, [X]), Offer(X, False, [Y])]).runs == X.digest, "the earlier one of the first rank"
    assert decide([Offer(BARRIER, False, [X]), Offer(BARRIER, False, []), Offer(X, True, [])]).runs is None
    assert decide([Offer(BARRIER, False, []), Offer(BARRIER, False, [X])]).runs == BARRIER.digest


def test_calls_of_one_name_that_differ_are_found_when_all_ranks_have_made_them() -> None:
    unlike = offered("x", "int32[1]")
    assert decide([Offer(BARRIER, False, [X]), Offer(unlike, True, [])]) == Decision(differs=X.key)
    assert decide([Offer(None, False, [X]), Offer(unlike, True, []), Offer(BARRIER, False, [])]) == Decision(
        some_yield=True
    )


def test_ranks_that_cannot_go_on() -> None:
    assert decide([Offer(None, False, [X]), Offer(None, False, [Y])]) == Decision()
    assert decide([Offer(None, False, [X]), Offer(BARRIER, False, [])]) == Decision()
    assert decide([Offer(None, True, [X]), Offer(BARRIER, False, [])]) == Decision(some_yield=True)


def test_only_calls_with_a_name_have_a_key() -> None:
    assert X.key == "allreduce x"
    assert BARRIER.key is None
    assert Call(CallKind.OTHER, ("allgather(name='x')",), name="x").key is None
    assert Call(CallKind.OTHER, ("allgather()",), is_unique=True).key is None
