from __future__ import annotations

import functools
import itertools
import operator

import hypothesis
import torch
from hypothesis import strategies

from elasticstate.horovod import calls, negotiation
from elasticstate.horovod.calls import Call, CallKind


def test_the_text_names_what_must_be_the_same_on_all_ranks() -> None:
    assert calls.signature("allreduce", None, op="Sum", prescale_factor=None) == "allreduce(op=Sum)"
    assert calls.signature("broadcast", "x", root_rank=0) == "broadcast(name='x', root_rank=0)"
    assert calls.form(torch.empty(2, 3, dtype=torch.int8)) == "int8[2, 3]"
    assert calls.form(torch.empty(2, 3), any_length=True) == "float32[*, 3]"
    assert calls.form(torch.tensor(1.0), any_length=True) == "float32[]"
    assert calls.form(torch.empty(2, device="meta")) == "float32[2] on meta"
    assert calls.form(torch.eye(2).to_sparse()) == "float32[2, 2], sparse_coo"


def test_equal_texts_have_equal_digests_that_fit_a_header() -> None:
    digests = [Call(CallKind.OTHER, lines).digest for lines in (("a",), ("a", "b"), ("a", "c"), ("a",))]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3
    assert all(0 <= digest < 1 << 63 for digest in digests)


def test_all_ranks_find_out_from_one_number_whether_their_calls_are_the_same() -> None:
    calls_of_ranks: list[Call | None] = [None, *(Call(CallKind.OTHER, (name,)) for name in "abc")]
    calls_of_ranks.append(Call(CallKind.OTHER, ("a",), wrong="not a tensor"))
    for size in (2, 3):
        for given in itertools.product(calls_of_ranks, repeat=size):
            fingerprints = [negotiation.fingerprint(call) for call in given]
            union = functools.reduce(operator.or_, fingerprints)
            assert 0 <= union < 1 << 63
            same = len(set(given)) == 1 and given[0] is not None and not given[0].wrong
            assert [negotiation.are_equal(own, union) for own in fingerprints] == [same] * size


@hypothesis.given(strategies.lists(strategies.integers(0, (1 << 63) - 1), min_size=2, max_size=5))
def test_ranks_with_any_digests_come_to_the_same_result(digests: list[int]) -> None:
    fingerprints = [negotiation.fingerprint(_with_digest(digest)) for digest in digests]
    union = functools.reduce(operator.or_, fingerprints)
    assert [negotiation.are_equal(own, union) for own in fingerprints] == [len(set(fingerprints)) == 1] * len(digests)


def _with_digest(digest: int) -> Call:
    call = Call(CallKind.OTHER, ("any",))
    call.__dict__["digest"] = digest
    return call


def test_the_first_line_that_differs_is_found() -> None:
    assert negotiation._first_difference([b"aaaabbbbcccc", b"aaaabbbbcccc"]) == 0
    assert negotiation._first_difference([b"aaaabbbbcccc", b"aaaabbbbdddd"]) == 2
    assert negotiation._first_difference([b"aaaabbbb", b"aaaabbbbcccc", b"aaaabbbb"]) == 2
    assert negotiation._first_difference([b"aaaabbbb", b"xxxxbbbb"]) == 0


def test_many_ranks_are_counted() -> None:
    assert negotiation._ranks([3]) == "rank 3"
    assert negotiation._ranks([1, 2]) == "ranks 1, 2"
    assert negotiation._ranks(list(range(1000))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
