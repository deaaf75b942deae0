"""Strides of tensors, which fused optimizers of torch take for granted: from a commit into new tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from elasticstate.state.base import committer_of
from elasticstate.state.layout import c_strides, unusual_strides
from elasticstate.state.torch import TorchState
from tests.kit.sharded import SnapshotCopies, source
from tests.kit.state import Member, World

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
}


class Wrapped:
    """An optimizer of a library, with methods of its own that call torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def model_in_another_order() -> torch.nn.Module:
    torch.manual_seed(0)
    convolutions = [torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 1)]  # strides of size 1 are compared, too
    model = torch.nn.Sequential(*convolutions).to(memory_format=torch.channels_last)
    model.register_parameter("turned", torch.nn.Parameter(torch.randn(5, 2).t()))
    return model


def train(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    chosen = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=chosen)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    getattr(optimizer, "optimizer", optimizer).step()


def strides_of(optimizer: Any) -> list[Any]:
    state = getattr(optimizer, "optimizer", optimizer).state
    return [{key: t.stride() for key, t in entry.items() if torch.is_tensor(t)} for entry in state.values()]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped], ids=["plain", "wrapped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_trains_like_the_others(name: str, wrap: Callable[[Any], Any]) -> None:
    model = model_in_another_order()
    optimizer = wrap(OPTIMIZERS[name](model.parameters()))
    state = TorchState(model=model, optimizer=optimizer)
    for step in range(3):
        train(model, optimizer, step)
    state.commit()
    other = model_in_another_order()
    of_other = wrap(OPTIMIZERS[name](other.parameters()))
    TorchState(model=other, optimizer=of_other).apply(committer_of(state).snapshot.load_into({}))
    assert strides_of(of_other) == strides_of(optimizer)
    for step in range(3, 5):
        train(model, optimizer, step)
        train(other, of_other, step)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("survives", [False, True])
def test_attached_values_of_the_next_world_train_like_those_of_the_last(name: str, survives: bool) -> None:
    def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = model_in_another_order()
        return model, OPTIMIZERS[name](model.parameters())

    def attached(member: Member, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        state: Any = TorchState(step=0)
        committer_of(state).use_session(member)
        state.sync()
        state.attach(model=model, optimizer=optimizer, init=lambda: None)
        return state

    model, optimizer = parts()
    state = attached(Member(World(1)), model, optimizer)
    for step in range(3):
        train(model, optimizer, step)
        state.commit()
    other, of_other = parts()
    if survives:
        train(other, of_other, 7)
    world = World(1, 2, line=state.commits[0], sources=(source(7, 0, state.commits[0]),))
    world.reader = SnapshotCopies(lambda slot: committer_of(state).snapshot)
    known = [value for entry in of_other.state.values() for value in entry.values()]
    attached(Member(world), other, of_other)
    found = [value for entry in of_other.state.values() for value in entry.values()]
    assert all(map(operator.is_, known, found)), "tensors that fit are kept"
    assert strides_of(of_other) == strides_of(optimizer)
    for step in range(3, 5):
        train(model, optimizer, step)
        train(other, of_other, step)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_arrays_of_a_newcomer_have_the_order_of_the_commit() -> None:
    turned = np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)
    thin = np.lib.stride_tricks.as_strided(np.arange(3.0), (3, 1), (8, 8))  # in C order, with another stride
    arrays = {"fortran": np.asfortranarray(np.eye(3)), "turned": turned, "reversed": np.arange(6.0)[::-1], "thin": thin}
    state = TorchState(**arrays)
    state.commit()
    newcomer: Any = TorchState(**dict.fromkeys(arrays))
    newcomer.apply(committer_of(state).snapshot.load_into({}))
    assert newcomer.fortran.flags.f_contiguous
    assert newcomer.turned.strides == turned.strides
    buffers = [
        page.memory.numpy() for page in (committer_of(state).snapshot._newer, committer_of(state).snapshot._older)
    ]
    for name, array in arrays.items():
        assert np.array_equal(getattr(newcomer, name), array)
        assert not any(np.may_share_memory(getattr(newcomer, name), buffer) for buffer in buffers)


@given(st.lists(st.integers(0, 3), max_size=5), st.data())
def test_strides_are_kept_exactly_where_a_tensor_has_no_holes(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    dense = torch.empty(sizes).permute(order)
    kept = unusual_strides(tuple(dense.shape), dense.stride())
    assert c_strides(tuple(sizes)) == torch.empty(sizes).stride()
    if dense.stride() == c_strides(tuple(dense.shape)):
        assert kept == ()
    elif dense.numel():
        assert kept == dense.stride()
        assert torch.empty_strided(dense.shape, kept).untyped_storage().nbytes() == 4 * dense.numel()
    holes = torch.empty([2 * size for size in sizes])[tuple(slice(0, size) for size in sizes)]
    if holes.numel() > 1 and not holes.is_contiguous():
        assert unusual_strides(tuple(holes.shape), holes.stride()) == ()
