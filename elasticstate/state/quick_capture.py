"""Quick capture: what ``TorchState.capture`` would return, without a walk through modules and optimizers.

A full capture takes some microseconds for each tensor, too many for each tick. A quick capture is made from a full one.
As long as the registries of all modules and the states of all optimizers contain the same objects, only the plain
values are read anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elasticstate._native import Identities
from elasticstate.compat import modules
from elasticstate.compat.loaders import state_of
from elasticstate.state.containers import flatten
from elasticstate.state.module_state import is_usual
from elasticstate.state.optimizer_state import is_plain_optimizer, plain_groups
from elasticstate.state.values import Captured, Tree, is_array

_IMMUTABLE = frozenset({int, float, str, bool, type(None)})


class QuickCapture:
    """A repeatable capture of the values of one state. ``make`` returns one, if the values allow it."""

    def __init__(self, live: Mapping[str, Any], captured: Captured) -> None:
        self._live, self._captured = live, captured
        self._same: list[tuple[str, Any]] = []  # values that must stay the same objects
        self._optimizers: list[tuple[str, torch.optim.Optimizer, Any, list[Any]]] = []
        self._stateful: list[tuple[str, Any]] = []
        self._plain: list[str] = []
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
        elif isinstance(value, torch.nn.Module):
            return self._add_module(name, value)
        elif isinstance(self._captured[name], Tree):
            self._same.append((name, value))
            if is_plain_optimizer(value):
                return self._add_optimizer(name, value)
            self._stateful.append((name, value))
            return not self._has_tensors(f"{name}.")
        else:
            self._plain.append(name)
        return True

    def _add_module(self, name: str, value: torch.nn.Module) -> bool:
        parts = list(value.modules())
        if self._captured[name].tree["extra"] or not all(map(is_usual, parts)):
            return False
        self._same.append((name, value))
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
        for name in self._plain:
            value = found[name] = live[name]
            if type(value) not in _IMMUTABLE and (is_array(value) or hasattr(value, "state_dict")):
                return None
        return found

    def expand(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Return what ``capture`` would return except its tensors, from a copy of what ``objects`` returned."""
        found = {name: value for name, value in self._captured.items() if isinstance(value, Tree)}
        found |= {name: objects[name] for name in self._plain}
        for name, _ in self._stateful:
            found[name] = Tree(flatten(objects[name], name, found))
        for name, _, _, _ in self._optimizers:
            groups = flatten(objects[name], f"{name}.param_groups", found)
            found[name] = Tree({"state": self._captured[name].tree["state"], "param_groups": groups})
        return found
