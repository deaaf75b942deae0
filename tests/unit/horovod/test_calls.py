from __future__ import annotations

import torch

from elasticstate.horovod import calls, headers
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


def test_the_first_line_that_differs_is_found() -> None:
    assert headers._first_difference([b"aaaabbbbcccc", b"aaaabbbbcccc"]) == 0
    assert headers._first_difference([b"aaaabbbbcccc", b"aaaabbbbdddd"]) == 2
    assert headers._first_difference([b"aaaabbbb", b"aaaabbbbcccc", b"aaaabbbb"]) == 2
    assert headers._first_difference([b"aaaabbbb", b"xxxxbbbb"]) == 0


def test_many_ranks_are_counted() -> None:
    assert headers._ranks([3]) == "rank 3"
    assert headers._ranks([1, 2]) == "ranks 1, 2"
    assert headers._ranks(list(range(1000))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
