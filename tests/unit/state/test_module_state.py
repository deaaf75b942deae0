"""Modules with all kinds of content that a module may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elasticstate.state.base import committer_of
from elasticstate.state.module_state import running_statistics
from elasticstate.state.torch import TorchState
from tests.kit.state import read_commit


class Odd(torch.nn.Module):
    """Module with tied weights, hidden and late buffers, extra state, a 0-d and an empty parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(6, 3)
        self.head = torch.nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.empty = torch.nn.Parameter(torch.randn(0, 3))
        self.narrow = torch.nn.Parameter(torch.randn(3, 2).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.register_buffer("none", None)
        self.calls = [seed]

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "moment": torch.full((2,), float(len(self.calls)))}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        self.moment = state["moment"]


def picture(module: Odd) -> Any:
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {k: (t.dtype, t.shape, bytes(t.detach().flatten().view(torch.uint8))) for k, t in tensors.items()}, [
        *module.calls
    ]


def test_a_module_comes_back_with_all_it_has() -> None:
    module, newcomer = Odd(0), Odd(1)
    module.cache = torch.randn(5)
    module.register_buffer("late", torch.randn(4), persistent=False)
    module.embedding.register_buffer("deep", torch.randn(4))
    state = TorchState(model=module)
    state.commit()
    committed = picture(module)
    weight = module.head.weight
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.add_(1)
    module.cache = torch.randn(7)
    module.calls.append(1)
    assert picture(module) != committed
    state.restore()
    assert picture(module) == committed
    assert module.head.weight is module.embedding.weight is weight
    assert module.moment.tolist() == [1, 1]
    other = TorchState(model=newcomer)
    other.apply(read_commit(committer_of(state).snapshot, state.commits[0]))
    assert picture(newcomer) == committed
    assert newcomer.head.weight is newcomer.embedding.weight
    module.moment.fill_(9)
    module.calls.append(2)
    module.cache.fill_(9)
    state.restore()
    assert module.moment.tolist() == [1, 1], "what was handed out was not the commit's own"
    assert picture(module) == committed


def test_tied_weights_are_stored_once() -> None:
    state = TorchState(model=Odd(0))
    state.commit()
    offsets = {entry.name: entry.offset for entry in committer_of(state).snapshot._newer.frame.layout.entries}
    assert offsets["model.parameters.head.weight"] == offsets["model.parameters.embedding.weight"]


class Late(torch.nn.Module):
    """Module that makes some of its buffers in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("running", None)
        self.register_buffer("hidden", None, persistent=False)
        self.register_buffer("kept", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.running is None:
            self.running, self.hidden = x.detach().mean(0), x.detach()
            self.linear.register_buffer("late", torch.ones(3))
            self.linear.register_buffer("passing", torch.ones(3), persistent=False)
            self.kept = None
        return self.linear(x)


def buffers(module: torch.nn.Module) -> dict[str, Any]:
    """Return all registered buffers, also those that are None, and the names in the state_dict."""
    found = {f"{path}.{k}": b for path, part in module.named_modules() for k, b in part._buffers.items()}
    return {"values": {k: b if b is None else b.tolist() for k, b in found.items()}, "saved": [*module.state_dict()]}


def test_a_restore_removes_the_buffers_that_the_commit_does_not_have() -> None:
    module = Late()
    state = TorchState(model=module)
    state.commit()
    committed = buffers(module)
    module(torch.randn(4, 2))
    assert buffers(module) != committed
    state.restore()
    assert buffers(module) == committed


def test_a_newcomer_has_the_same_buffers_as_the_commit() -> None:
    """Buffers made late, and buffers set to None. The newcomer has no other buffer, and each keeps its persistence."""
    module, newcomer = Late(), Late()
    module(torch.randn(4, 2))
    state = TorchState(model=module)
    state.commit()
    newcomer.linear.register_buffer("own", torch.ones(1))
    TorchState(model=newcomer).apply(read_commit(committer_of(state).snapshot, state.commits[0]))
    assert buffers(newcomer) == buffers(module)


class HasOdd(torch.nn.Module):
    def __init__(self, seed: int, is_compiled: bool) -> None:
        super().__init__()
        part: Any = Odd(seed)
        self.part: Any = torch.compile(part, backend="eager") if is_compiled else part
        self.norm = torch.nn.BatchNorm1d(2)

    def odd(self) -> Any:
        return getattr(self.part, "_orig_mod", self.part)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_names_are_the_same_with_and_without_the_compiler(is_compiled: bool) -> None:
    """A commit of a compiled module loads into one that is not compiled, and the other way round."""
    first, second = HasOdd(0, is_compiled), HasOdd(1, not is_compiled)
    compiled = first if is_compiled else second
    models: list[Any] = [torch.compile(m, backend="eager") if m is compiled else m for m in (first, second)]
    state = TorchState(model=models[0])
    state.commit()
    values = read_commit(committer_of(state).snapshot, state.commits[0])
    assert not [name for name in values if "orig_mod" in name]
    other = TorchState(model=models[1])
    other.apply(values)
    assert picture(second.odd()) == picture(first.odd())
    other.commit()
    assert read_commit(committer_of(other).snapshot, other.commits[0]).keys() == values.keys()
    statistics = [list(running_statistics("model", model)) for model in models]
    assert statistics[0] == statistics[1]
    assert statistics[0] == [f"model.buffers.norm.{k}" for k in ("running_mean", "running_var", "num_batches_tracked")]
