"""Versions of many tensors at once, next to those that torch gives."""

from __future__ import annotations

import random

import pytest
import torch

from elasticstate._native import counters_of
from elasticstate.compat import torch_tensors
from elasticstate.compat.torch_tensors import exact_versions, quick_versions


def test_the_installed_torch_has_one_place_for_a_version() -> None:
    assert torch_tensors._place() is not None


def written_in_secret(tensor: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.add_(1)


def test_quick_versions_are_the_exact_ones_after_any_writes() -> None:
    chance = random.Random(1)
    tensors = [torch.zeros(4) for _ in range(40)] + [torch.nn.Parameter(torch.zeros(3)) for _ in range(10)]
    views = [tensors[0].view(2, 2), tensors[1].detach(), torch.nn.Parameter(tensors[2]), tensors[3][1:]]
    tensors += views
    writes = [
        lambda t: t.zero_(),
        lambda t: t.add_(1),
        lambda t: torch._foreach_mul_([t], 2.0),
        lambda t: t.copy_(torch.ones(t.shape)),
        lambda t: setattr(t, "data", torch.ones(2)),
        lambda t: torch.utils.swap_tensors(chance.choice(tensors[4:40]), t) if type(t) is torch.Tensor else None,
        lambda t: t.resize_(7) if not t.requires_grad else None,
        written_in_secret,
    ]
    with torch.no_grad():
        for _ in range(3000):
            found = chance.choice(tensors[4:50])
            chance.choice(writes)(found)
            if chance.random() < 0.05:
                chance.choice(tensors).add_(1)
            assert quick_versions(tensors) == exact_versions(tensors)


def test_the_numbers_of_tensors_are_those_of_their_positions() -> None:
    for count in (0, 1, 7, 8, 9, 24, 25, 100):
        tensors = [torch.zeros(1) for _ in range(count)]
        for number, tensor in enumerate(tensors):
            for _ in range(number):
                tensor.zero_()
        expected = b"".join(number.to_bytes(8, "little") for number in range(count))
        assert quick_versions(tensors) == exact_versions(tensors) == expected


def test_a_tensor_without_a_version_has_none() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(1)]
    assert int.from_bytes(quick_versions(tensors), "little", signed=True) == -1
    with pytest.raises(RuntimeError, match="version counter"):
        exact_versions(tensors)


def test_without_a_place_the_attribute_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_tensors, "_place", lambda: None)
    tensors = [torch.zeros(1).zero_()]
    assert quick_versions(tensors) == exact_versions(tensors) == (1).to_bytes(8, "little")


def test_without_exactly_one_candidate_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch_tensors._place()
    assert place is not None
    for candidates in [[], [place, place._replace(in_object=24)]]:
        monkeypatch.setattr(torch_tensors, "_candidates", lambda *_, found=candidates: iter(found))
        monkeypatch.setattr(torch_tensors, "counters_of", lambda tensors, *_: exact_versions(tensors))
        assert torch_tensors._place.__wrapped__() is None


def test_objects_that_are_too_small_are_refused() -> None:
    with pytest.raises(TypeError, match="too small"):
        counters_of([object()], 16, 40, 16)
