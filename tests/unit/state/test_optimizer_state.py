"""The size of the state that an optimizer of torch will have after its first step, found before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from elasticstate.state.optimizer_state import bytes_to_come


class Own(optim.AdamW):
    """A subclass without a state of its own."""


class Unknown(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def state_bytes(optimizer: optim.Optimizer) -> int:
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ASGD", {}),
        ("Adadelta", {}),
        ("Adafactor", {}),
        ("Adagrad", {}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("Adamax", {}),
        ("Muon", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_first_step_adds(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    if not hasattr(optim, kind):
        pytest.skip(f"this torch has no {kind}")
    trained = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((300, 200), (50, 40))]
    frozen = torch.nn.Parameter(torch.ones(1000, 10), requires_grad=False)
    optimizer = getattr(optim, kind)([{"params": [trained[0], frozen]}, {"params": [trained[1]]}], lr=0.1, **options)
    before = state_bytes(optimizer)
    found = bytes_to_come([object(), optimizer])
    assert found is not None
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert state_bytes(optimizer) - before == pytest.approx(found, abs=4000), "small tensors are not counted"
    assert bytes_to_come([optimizer]) == 0, "nothing is to come any more"


def test_several_optimizers_and_subclasses() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    sparse, own = optim.SparseAdam([parameter]), Own([parameter], amsgrad=True)
    assert bytes_to_come([sparse, own]) == 20_000
    assert bytes_to_come([optim.LBFGS([parameter], history_size=10)]) == 88_000
    assert bytes_to_come([]) == 0


def test_an_optimizer_that_is_not_one_of_torch_is_not_known() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    assert bytes_to_come([optim.Adam([parameter]), Unknown([parameter])]) is None
