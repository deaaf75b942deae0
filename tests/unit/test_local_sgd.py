"""LocalSGD and DiLoCo of one worker alone. Several workers: tests/integration/test_local_sgd.py."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import elasticstate as elastic
from elasticstate import UsageError
from elasticstate.local_sgd import DiLoCo, LocalSGD, _split


def training() -> tuple[elastic.TorchState, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return elastic.TorchState(model=model, optimizer=optimizer), model, optimizer


def inner_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def flat(tensors: Any) -> Any:
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def test_local_sgd_alone_is_plain_training() -> None:
    state, model, optimizer = training()
    _, plain, of_plain = training()
    local = LocalSGD(state, every=3)
    for step in range(10):
        inner_step(model, optimizer, step)
        local.step()
        inner_step(plain, of_plain, step)
    np.testing.assert_allclose(flat(model.parameters()), flat(plain.parameters()), rtol=1e-12)


def test_diloco_alone_is_a_momentum_over_the_moves() -> None:
    state, model, optimizer = training()
    diloco = DiLoCo(state, every=4)
    outer, momentum = flat(model.parameters()), 0.0
    for step in range(12):
        inner_step(model, optimizer, step)
        gradient = outer - flat(model.parameters())
        diloco.step(samples=8)
        if step % 4 == 3:
            momentum = 0.9 * momentum + gradient
            outer = outer - 0.7 * (gradient + 0.9 * momentum)
            np.testing.assert_allclose(flat(model.parameters()), outer, rtol=1e-12)
    assert state.commits[0] == (0, 3)


def test_fragments_have_outer_steps_in_turn() -> None:
    state, model, optimizer = training()
    diloco = DiLoCo(state, every=4, fragments=2)
    outer = list(state.local_sgd["parameters"])
    before = copy.deepcopy(outer)
    for step, moved in enumerate([[], [0], [0], [0, 1, 2, 3]]):
        inner_step(model, optimizer, step)
        diloco.step()
        assert [i for i in range(4) if not torch.equal(outer[i], before[i])] == moved
    inner_step(model, optimizer, 4)
    diloco.step()
    assert flat(model.parameters()).tolist() != flat(outer).tolist()
    diloco.outer_step()
    assert flat(model.parameters()).tolist() == flat(outer).tolist()
    assert diloco.state_dict()["samples"] == [0, 0]


def test_a_commit_between_outer_steps_keeps_the_own_parameters_of_this_worker() -> None:
    state, model, optimizer = training()
    local = LocalSGD(state, every=10, commit_every=2)
    for step in range(2):
        inner_step(model, optimizer, step)
        local.step(samples=5)
    committed = flat(model.parameters())
    inner_step(model, optimizer, 2)
    local.step(samples=5)
    state.restore()
    assert flat(model.parameters()).tolist() == committed.tolist()
    assert flat(state.local_sgd["parameters"]).tolist() != committed.tolist()
    assert local.state_dict()["samples"] == [10]
    assert local.state_dict()["steps"] == 2


@pytest.mark.parametrize("foreign", [{"owner": "another:0"}, {"samples": [8, 8]}])
def test_the_state_of_another_worker_is_continued_at_the_outer_parameters(foreign: dict[str, object]) -> None:
    state, model, optimizer = training()
    local = LocalSGD(state, every=10)
    outer = flat(model.parameters())
    inner_step(model, optimizer, 0)
    local.step(samples=8)
    own = local.state_dict()
    moved = flat(model.parameters())
    local.load_state_dict(own)
    assert flat(model.parameters()).tolist() == moved.tolist()
    local.load_state_dict({**own, **foreign})
    assert flat(model.parameters()).tolist() == outer.tolist()
    assert local.state_dict() == {**own, "samples": [0]}


def test_a_check_compares_the_outer_values_alone() -> None:
    state, _, _ = training()
    DiLoCo(state, every=2)
    names = [name for name in ("model", "optimizer", "local_sgd") if name not in state._exclusions]
    assert names == ["model", "local_sgd"]
    for name in ("model.parameters.0.weight", "local_sgd.worker.samples.0", "local_sgd.worker.owner"):
        assert name in state._exclusions
    for name in (
        "model.buffers.x",
        "local_sgd.parameters.parameters.0",
        "local_sgd.optimizer",
        "local_sgd.worker.steps",
    ):
        assert name not in state._exclusions


def test_parameters_of_several_dtypes_are_averaged() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16(), torch.nn.Linear(2, 2)])
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.5)  # the last one is frozen
    state = elastic.TorchState(model=model, optimizer=optimizer)
    local = LocalSGD(state, every=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = [parameter.detach() - 0.5 for parameter in (model[0].bias, model[1].bias)]
    optimizer.step()
    local.step()
    torch.testing.assert_close(model[0].bias.detach(), expected[0])
    torch.testing.assert_close(model[1].bias.detach(), expected[1], atol=0.01, rtol=0.0)


def test_steps_without_samples_do_not_count() -> None:
    state, model, optimizer = training()
    before = flat(model.parameters())
    diloco = DiLoCo(state, every=1)
    inner_step(model, optimizer, 0)
    diloco.step(samples=0)
    assert flat(model.parameters()).tolist() == before.tolist()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 5, "fragments": 2}, "every must be a multiple of fragments"),
        ({"every": 5, "fragments": 5}, "fragments must be from 1 to 4"),
        ({"every": 5, "commit_every": -1}, "must not be negative"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, int], reason: str) -> None:
    state, _, _ = training()
    with pytest.raises(UsageError, match=reason):
        DiLoCo(state, **arguments)  # type: ignore[arg-type]


def test_a_state_that_cannot_be_used_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="the state has no optimizer"):
        LocalSGD(elastic.TorchState(model=model), every=1)
    state, model, optimizer = training()
    local = LocalSGD(state, every=1)
    with pytest.raises(UsageError, match="'local_sgd' is a value"):
        LocalSGD(state, every=1)
    with pytest.raises(UsageError, match="must not be negative"):
        local.step(samples=-1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match="trains other parameters"):
        local.step()
    used, _, _ = training()
    used.commit()
    with pytest.raises(UsageError, match="a state that is in use"):
        LocalSGD(used, every=1)


def test_a_state_is_released_without_a_garbage_collection() -> None:
    state, _, _ = training()
    local = LocalSGD(state, every=1)
    local.step()
    gone = weakref.ref(state)
    del state, local
    assert gone() is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_fragments_are_of_about_equal_sizes(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    pairs = [(torch.zeros(size), torch.zeros(size)) for size in sizes]
    fragments = _split(pairs, count)
    assert [id(pair[0]) for fragment in fragments for pair in fragment] == [id(pair[0]) for pair in pairs]
    assert len(fragments) == count
    assert all(fragments)
    largest = max(sum(pair[0].numel() for pair in fragment) for fragment in fragments)
    assert largest <= sum(sizes) / count + 1.5 * max(sizes)
