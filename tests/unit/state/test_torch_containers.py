"""Lists, tuples and dicts of modules, optimizers and other objects with ``state_dict()``, as values of a state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticstate import StateError, TorchState


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    loss: Any = sum(model(torch.ones(1, 2)).square().sum() for model in models)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "contain",
    [
        list,
        tuple,
        lambda objects: dict(zip("abc", objects, strict=False)),
        lambda objects: OrderedDict(zip("abc", objects, strict=False)),
        lambda objects: {(number, "key"): each for number, each in enumerate(objects)},
        lambda objects: {"first": objects[0], "others": [*objects[1:]]},
    ],
    ids=["list", "tuple", "dict", "ordered_dict", "dict_without_text_keys", "nested"],
)
def test_a_restore_writes_into_the_objects_themselves(contain: Any) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    state = TorchState(models=contain(models), optimizers=contain(optimizers), step=0)
    train(models, optimizers)
    state.commit()
    expected = copy.deepcopy([each.state_dict() for each in (*models, *optimizers)])
    models[0].eval()
    models[1].requires_grad_(False)
    train(models[:1], optimizers)
    state.restore()
    for each, content in zip((*models, *optimizers), expected, strict=True):
        torch.testing.assert_close(each.state_dict(), content, rtol=0, atol=0)
    assert all(part.training for model in models for part in model.modules())
    assert all(p.requires_grad for model in models for p in model.parameters())


def test_a_new_process_gets_the_content_into_its_own_objects() -> None:
    here, there = ([nn.Linear(2, 2), nn.Linear(2, 2)] for _ in range(2))
    TorchState(models=there).apply(TorchState(models=here).capture())
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(here, there, strict=True))


def test_other_objects_than_in_the_commit_are_named() -> None:
    commit = TorchState(models=[nn.Linear(2, 2), nn.Linear(2, 2)]).capture()
    with pytest.raises(StateError, match=r"state\.models consists of models\.0, in the commit of models\.0, models\.1"):
        TorchState(models=[nn.Linear(2, 2)]).apply(commit)
    with pytest.raises(StateError, match=r"state\.models consists of no objects with state_dict\(\), in the commit of"):
        TorchState(models=[]).apply(commit)


def test_a_container_with_plain_values_in_it_is_a_plain_value() -> None:
    state = TorchState(pair=[nn.Linear(2, 2), 0.5])
    state.commit()
    assert "pair" in state._pickled()
    first = state.pair[0]
    weight = first.weight.detach().clone()
    with torch.no_grad():
        first.weight.zero_()
    state.pair[1] = 0.7
    state.restore()
    assert state.pair[1] == 0.5
    assert state.pair[0] is first
    assert torch.equal(first.weight, weight)


@pytest.mark.parametrize("contain", [list, tuple, lambda objects: dict(zip("ab", objects, strict=True))])
def test_wrappers_of_a_world_are_taken_off_at_its_end(contain: Any, one_process: None) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    wrapped = [DistributedDataParallel(models[0]), torch.compile(DistributedDataParallel(models[1]), backend="eager")]
    state = TorchState(models=contain(wrapped), one=DistributedDataParallel(models[0]), plain=[1, 2])
    assert "models.1.parameters.weight" in state.capture() or "models.b.parameters.weight" in state.capture()
    kept = state.models
    state._leave_world()
    found = state.models.values() if isinstance(state.models, dict) else state.models
    assert all(one is other for one, other in zip(found, models, strict=True))
    assert (state.one, state.plain) == (models[0], [1, 2])
    assert isinstance(kept, tuple) or state.models is kept
