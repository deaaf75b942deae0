from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import elasticstate
from elasticstate import compat
from elasticstate.compat import modules
from elasticstate.state import module_state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.same = self.inner
        self.weight = nn.Parameter(torch.ones(3))
        self.register_parameter("no_weight", None)
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("dropped", torch.zeros(1), persistent=False)
        self.register_buffer("no_buffer", None)
        self.register_module("no_child", None)


def test_the_registries_of_a_module_have_the_expected_content() -> None:
    block = Block()
    assert modules.has_registries()
    assert modules.parameters_of(block) == {"weight": block.weight, "no_weight": None}
    assert modules.buffers_of(block) == {"kept": block.kept, "dropped": block.dropped, "no_buffer": None}
    assert modules.transient_buffers_of(block) == {"dropped"}
    assert modules.children_of(block) == {"inner": block.inner, "same": block.inner, "no_child": None}


def test_a_buffer_may_be_none() -> None:
    block = Block()
    assert [modules.has_buffer(block, name) for name in ("kept", "no_buffer")] == [True, True]
    assert [modules.has_buffer(block, name) for name in ("weight", "inner", "absent")] == [False, False, False]


@pytest.mark.parametrize("name", [*nn.modules.batchnorm.__all__, *nn.modules.instancenorm.__all__])
def test_all_norms_of_torch_have_the_base_class(name: str) -> None:
    assert issubclass(getattr(nn, name), modules.NORMS)


def test_other_classes_are_no_norms() -> None:
    assert not issubclass(nn.LayerNorm, modules.NORMS)
    assert not issubclass(nn.GroupNorm, modules.NORMS)


def test_without_the_base_class_torchs_own_norms_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.modules.batchnorm, "_NormBase")
    norms = modules._norms()
    assert issubclass(nn.BatchNorm2d, norms)
    assert issubclass(nn.InstanceNorm1d, norms)
    assert not issubclass(nn.SyncBatchNorm, norms)
    assert not issubclass(nn.LayerNorm, norms)


def test_without_the_registries_a_commit_uses_public_methods_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(modules, "_REGISTRIES", ("_parameters", "_renamed"))
    compat.warn_absent.cache_clear()
    module_state._class_facts.cache_clear()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = elasticstate.TorchState(model=model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with caplog.at_level(logging.WARNING, "elasticstate"):
            state.commit()
            model(torch.randn(4, 2))
            with torch.no_grad():
                model[0].weight.add_(1)
            state.restore()
            state.commit()
    finally:
        module_state._class_facts.cache_clear()
        compat.warn_absent.cache_clear()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    (record,) = caplog.records
    assert record.getMessage().startswith(f"torch {torch.__version__.partition('+')[0]}")
    assert "has no torch.nn.Module._renamed, so" in record.getMessage()
