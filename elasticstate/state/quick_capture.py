"""Quick capture: what ``TorchState.capture`` would return, without a walk through modules and optimizers.

A full capture takes some microseconds for each tensor, too many for each tick. A quick capture is made from a full one.
As long as the registries of all modules and the states of all optimizers contain the same objects, only the plain
values and the modes of modules and parameters are read anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from elasticstate._native import Identities
from elasticstate.compat import modules
from elasticstate.compat.modules import state_of
from elasticstate.compat.torch_tensors import requires_grad_of
from elasticstate.state.module_state import (
    Walk,
    flag_of,
    is_usual,
    parts_of,
    requires_grad,
)
from elasticstate.state.optimizer_state import is_plain_optimizer, plain_groups
from elasticstate.state.values import Captured, Tree, flatten, is_array

_IMMUTABLE = frozenset({int, float, str, bool, type(None)})
_training = itemgetter("training")  # of a module's attributes


class QuickCapture:
    """A repeatable capture of the values of one state. ``make`` returns one, if the values allow it."""

    def __init__(self, live: Mapping[str, Any], captured: Captured) -> None:
        self._live, self._captured = live, captured
        self._same: list[tuple[str, Any]] = []  # values that must stay the same objects
        self._optimizers: list[tuple[str, torch.optim.Optimizer, Any, list[Any]]] = []
        self._stateful: list[tuple[str, Any]] = []
        self._plain: list[str] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._modules: list[_Modes] = []
        self._containers: list[Any] = []
        self._identities = Identities([])

    @classmethod
    def make(cls, live: Mapping[str, Any], names: tuple[str, ...], captured: Captured) -> QuickCapture | None:
        """Return a quick capture; None if a value needs a full capture each time.

        Args:
            live: the attributes of the state; read again at each capture.
            captured: a full capture of the present values.
        """
        self = cls(live, captured)
        if not all(self._add(name, live[name]) for name in names):
            return None
        self._identities = Identities(self._containers)
        return self

    def _add(self, name: str, value: Any) -> bool:
        if is_array(value):
            self._same.append((name, value))
            if isinstance(value, torch.Tensor) and flag_of(name) in self._captured:
                self._tensors.append((flag_of(name), value))
        elif isinstance(value, torch.nn.Module):
            return self._add_module(name, value)
        elif isinstance(self._captured[name], Tree):
            self._same.append((name, value))
            if is_plain_optimizer(value):
                return self._add_optimizer(name, value)
            self._stateful.append((name, value))
            if isinstance(value, torch.optim.Optimizer):
                return False  # its groups may change
            return not self._has_tensors(f"{name}.")
        else:
            self._plain.append(name)
        return True

    def _add_module(self, name: str, value: torch.nn.Module) -> bool:
        parts = list(value.modules())
        if self._captured[name].tree["extra"] or not all(map(is_usual, parts)):
            return False
        if not all("training" in vars(part) for part in parts if not modules.compiles_another(type(part))):
            return False
        self._same.append((name, value))
        self._modules.append(_Modes(name, value))
        for part in parts:
            self._containers += [modules.parameters_of(part), modules.buffers_of(part), modules.children_of(part)]
        return True

    def _add_optimizer(self, name: str, value: torch.optim.Optimizer) -> bool:
        entries = list(value.state.values())
        tensors = (item for entry in entries if type(entry) is dict for item in entry.values())
        lists = [group["params"] for group in value.param_groups]
        if not all(type(found) is kind for kind, group in ((dict, entries), (list, lists)) for found in group):
            return False
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return False
        self._containers += [value.state, *entries, value.param_groups, *lists]
        self._optimizers.append((name, value, value.state, value.param_groups))
        return not self._has_tensors(f"{name}.param_groups.")

    def _has_tensors(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._captured)

    def objects(self) -> dict[str, Any] | None:
        """Return the objects that may have changed, for ``expand``; None if a full capture is necessary.

        The tensors and arrays are those of the full capture. Any other tensors are part of the objects: pickle them.
        """
        live = self._live
        for name, value in self._same:
            if live[name] is not value:
                return None
        for _, optimizer, state, groups in self._optimizers:
            if optimizer.state is not state or optimizer.param_groups is not groups:
                return None
        if not self._identities.unchanged():
            return None
        found: dict[str, Any] = {}
        for name, optimizer, _, _ in self._optimizers:
            found[name] = plain_groups(optimizer)
        for name, value in self._stateful:
            found[name] = state_of(value)
        for modes in self._modules:
            found[modes.name] = modes.read()
        for name, tensor in self._tensors:
            found[name] = requires_grad(tensor)
        for name in self._plain:
            value = found[name] = live[name]
            if type(value) not in _IMMUTABLE and (is_array(value) or hasattr(value, "state_dict")):
                return None
        return found

    def expand(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Return what ``capture`` would return except its tensors, from a copy of what ``objects`` returned."""
        found = {name: value for name, value in self._captured.items() if isinstance(value, Tree)}
        found |= {name: objects[name] for name in self._plain}
        found |= {name: objects[name] for name, _ in self._tensors}
        for name, _ in self._stateful:
            found[name] = Tree(flatten(objects[name], name, found))
        for modes in self._modules:
            found[modes.name] = Tree({**self._captured[modes.name].tree, **modes.expand(objects[modes.name])})
        for name, _, _, _ in self._optimizers:
            groups = flatten(objects[name], f"{name}.param_groups", found)
            found[name] = Tree({**self._captured[name].tree, "param_groups": groups})
        return found


class _Modes:
    """The modes of all parts, parameters and buffers of a module."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        parts = [(path, part) for path, part in parts_of(module) if not modules.compiles_another(type(part))]
        self._paths = [path for path, _ in parts]
        self._attributes = [vars(part) for _, part in parts]
        walk = Walk(module, "", "")
        self._names, self._parameters = list(walk.parameters), list(walk.parameters.values())
        self._buffer_names, self._buffers = list(walk.buffers), list(walk.buffers.values())

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return ``training`` of all parts, and ``requires_grad`` of all parameters and of all buffers: much at a time,
        for each tick."""
        return (
            bytes(map(_training, self._attributes)),
            requires_grad_of(self._parameters).tobytes(),
            bytes(map(requires_grad, self._buffers)),
        )

    def expand(self, read: tuple[bytes, bytes, bytes]) -> dict[str, list[str]]:
        """Return what ``module_state.modes`` would have returned."""
        training, trained = read[0], np.frombuffer(read[1], np.int64)
        return {
            "evaluating": [path for path, flag in zip(self._paths, training, strict=True) if not flag],
            "frozen": [name for name, flag in zip(self._names, trained, strict=True) if not flag],
            "trained": [name for name, flag in zip(self._buffer_names, read[2], strict=True) if flag],
        }
