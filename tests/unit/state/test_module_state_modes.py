"""Modes of modules and parameters: part of each commit, of tick records, and of what a newcomer gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from elasticstate.state.base import ObjectState, committer_of
from elasticstate.state.tick_record import QuickCapture
from elasticstate.state.torch import TorchState


class Custom(torch.nn.Sequential):
    """Overrides a method that a walk would use, and has a ``train`` with a side effect."""

    calls = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return super().named_parameters(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        Custom.calls += 1
        return super().train(mode)


def plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def shared() -> torch.nn.Module:
    part = torch.nn.Linear(2, 2)
    return torch.nn.Sequential(part, torch.nn.Dropout(), part)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": plain,
    "shared": shared,
    "custom": lambda: Custom(torch.nn.Linear(2, 2), torch.nn.Dropout()),
    "compiled": lambda: torch.compile(plain()),
    "compiled inside": lambda: torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2)), torch.nn.Dropout()),
    "average": lambda: AveragedModel(plain()),
    "script": lambda: torch.jit.script(plain()),
}


def modes(module: torch.nn.Module) -> Any:
    tensors = [*module.parameters(), *module.buffers()]
    return [m.training for m in module.modules()], [tensor.requires_grad for tensor in tensors]


def toggle(module: torch.nn.Module) -> None:
    """Put some parts into eval mode, and freeze some parameters."""
    [*parts], [*parameters] = module.modules(), module.parameters()
    parts[-1].eval()
    parameters[0].requires_grad_(False)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler uses it
@pytest.mark.parametrize("name", MODULES)
def test_a_restore_and_a_newcomer_have_the_modes_of_the_commit(name: str) -> None:
    module = MODULES[name]()
    toggle(module)
    expected = modes(module)
    state = TorchState(module=module)
    state.commit()
    calls = Custom.calls
    for mode in (True, False):
        module.train(mode)
        for parameter in module.parameters():
            parameter.requires_grad_(mode)
        state.restore()
        assert modes(module) == expected
    assert Custom.calls - calls in (0, 2), "a restore does not call train()"
    newcomer = MODULES[name]()
    TorchState(module=newcomer).apply(committer_of(state).snapshot.load_into({}))
    assert modes(newcomer) == expected


def test_a_buffer_has_the_flag_of_the_commit() -> None:
    module = plain()
    module.register_buffer("scale", torch.ones(2, requires_grad=True))
    state = TorchState(module=module)
    state.commit()
    module.scale.requires_grad_(False)
    module[1].running_mean.requires_grad_(True)
    state.restore()
    assert [name for name, buffer in module.named_buffers() if buffer.requires_grad] == ["scale"]
    newcomer = plain()
    TorchState(module=newcomer).apply(committer_of(state).snapshot.load_into({}))
    assert [name for name, buffer in newcomer.named_buffers() if buffer.requires_grad] == ["scale"]


def test_a_quick_capture_has_the_present_modes() -> None:
    module, tensor = plain(), torch.zeros(2)
    module.register_buffer("scale", torch.ones(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = TorchState(module=module, optimizer=optimizer, tensor=tensor)
    quick = QuickCapture.make(vars(state), ("module", "optimizer", "tensor"), state.capture())
    assert quick is not None
    toggle(module)
    tensor.requires_grad_(True)
    module.scale.requires_grad_(True)
    objects = quick.objects()
    assert objects is not None
    found, expected = quick.expand(objects), state.capture()
    assert found == {name: value for name, value in expected.items() if not isinstance(value, torch.Tensor)}
    assert found["module"].tree["evaluating"] == ["2"]
    assert found["module"].tree["frozen"] == ["0.weight"]
    assert found["module"].tree["trained"] == ["scale"]
    assert found["tensor.requires_grad"]


@pytest.mark.parametrize("kind", [TorchState, ObjectState])
def test_a_tensor_of_the_state_has_the_flag_of_the_commit(kind: Any) -> None:
    prompt = torch.nn.Parameter(torch.ones(3))
    state = kind(prompt=prompt, plain=torch.ones(2), computed=prompt * 2)
    state.commit()
    prompt.requires_grad_(False)
    state.plain.requires_grad_(True)
    state.restore()
    assert state.prompt is prompt
    assert prompt.requires_grad
    assert not state.plain.requires_grad
    other = kind(prompt=torch.zeros(3), plain=torch.zeros(2), computed=torch.zeros(3))
    other.apply(committer_of(state).snapshot.load_into({}))
    assert other.prompt.requires_grad
    assert not other.computed.requires_grad
    assert other.computed.tolist() == [2.0] * 3


def test_a_parameter_of_the_state_stays_the_same_object_in_another_shape() -> None:
    prompt = torch.nn.Parameter(torch.ones(3))
    state = TorchState(prompt=prompt, optimizer=torch.optim.SGD([prompt], lr=0.1))
    state.commit()
    prompt.data = torch.zeros(5)
    state.restore()
    assert state.prompt is prompt
    assert prompt.tolist() == [1.0] * 3
    assert prompt.requires_grad
