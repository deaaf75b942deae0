"""An optimizer with torch's own ``state_dict`` methods, as an attached value.

Its state is named by the parameters, not by their positions. ``get_optimizer_state_dict`` of
torch.distributed.checkpoint is not used: for an optimizer without state it runs a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elasticstate.compat import dtensors
from elasticstate.compat.dtensors import Split
from elasticstate.errors import StateError
from elasticstate.state.containers import flatten, rebuild_with
from elasticstate.state.optimizer_state import arrange_groups, check_settings
from elasticstate.state.restore_targets import RestoreTargets


class AttachedOptimizer:
    """An optimizer of parameters of attached modules."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self.optimizer = optimizer

    def owned(self) -> Iterator[int]:
        """Yield the ids of the tensors that only ``step`` writes: parameters that are trained, and their state."""
        for group in self.optimizer.param_groups:
            yield from (id(p) for p in group["params"] if p.requires_grad)
        for entry in self.optimizer.state.values():
            yield from map(id, entry.values() if isinstance(entry, dict) else ())

    def capture(self, values: dict[str, Any], names: Mapping[int, str]) -> Any:
        """Put the tensors into ``values``, and return the rest. ``names``: by id, those of all parameters.

        Raises StateError if a parameter does not belong to an attached module.
        """
        state: dict[str, Any] = {}
        placed: dict[str, tuple[Split, ...] | None] = {}
        for key, entry in self.optimizer.state.items():
            parameter = self._name_of(key, names)
            found: dict[str, Any] = {}
            state[parameter] = flatten(entry, self._state_at(parameter), found)
            for name, value in found.items():
                if dtensors.is_dtensor(value) or _is_like(key, value):
                    placed[name] = _splits(key, value)
            if taken := values.keys() & found.keys():
                raise StateError(f"two tensors have the name {min(taken)}. Rename a parameter.")
            values.update(found)
        groups = [
            {**group, "params": [self._name_of(p, names) for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "placed": placed, "param_groups": flatten(groups, self._groups_at, values)}

    def prepare(self, tree: Any, targets: RestoreTargets, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizer the groups and the state of the commit, and add all tensors to ``targets``."""
        optimizer = self.optimizer
        check_settings(self._name, optimizer, tree["param_groups"])
        saved = [list(group["params"]) for group in tree["param_groups"]]
        arrange_groups(self._name, optimizer, saved, parameters, tree["param_groups"])
        groups = rebuild_with(
            targets.tensor, tree["param_groups"], optimizer.param_groups, None, self._groups_at, set()
        )
        for group, rebuilt in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in rebuilt.items() if key != "params"})
        state = {}
        for name, entry in tree["state"].items():
            parameter = parameters[name]
            load = functools.partial(_load, targets, parameter, tree["placed"])
            at = self._state_at(name)
            state[parameter] = rebuild_with(load, entry, optimizer.state.get(parameter), parameter.device, at, set())
        optimizer.state.clear()
        optimizer.state.update(state)

    def _state_at(self, parameter: str) -> str:
        return f"{self._name}.state.{parameter}"

    @property
    def _groups_at(self) -> str:
        return f"{self._name}.param_groups"

    def _name_of(self, parameter: torch.Tensor, names: Mapping[int, str]) -> str:
        name = names.get(id(parameter))
        if name is None:
            raise StateError(
                f"{self._name} trains a tensor of shape {tuple(getattr(parameter, 'shape', ()))} that is no parameter "
                "of an attached module. Attach the module, too, and create the optimizer after fully_shard() or "
                "parallelize_module()."
            )
        return name


def _is_like(parameter: Any, value: Any) -> bool:
    """Return True if both are plain tensors of one shape. In another world, both may be sharded."""
    is_plain = isinstance(value, torch.Tensor) and not dtensors.is_dtensor(parameter)
    return is_plain and value.ndim > 0 and value.shape == parameter.shape


def _splits(parameter: Any, value: Any) -> tuple[Split, ...] | None:
    """Return the placements of a tensor, or None if they are those of its parameter."""
    if not dtensors.is_dtensor(value):
        return None
    if dtensors.is_dtensor(parameter) and parameter.placements == value.placements:
        return None
    return dtensors.splits_of(value)


def _load(
    targets: RestoreTargets,
    parameter: torch.Tensor,
    placed: Mapping[str, tuple[Split, ...] | None],
    live: object,
    name: str,
    device: torch.device,
) -> torch.Tensor:
    if name in placed:
        return targets.tensor_of(parameter, placed[name], live, name, device)
    return targets.tensor(live, name, device)
