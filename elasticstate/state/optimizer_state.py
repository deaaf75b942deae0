"""State of an optimizer with torch's own ``state_dict`` methods, in a commit."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from elasticstate.errors import StateError
from elasticstate.state.containers import flatten, rebuild
from elasticstate.state.values import Captured


def capture_optimizer(name: str, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> Any:
    """Return what ``Optimizer.state_dict`` returns: parameters are identified by position over all groups."""
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    positions = {id(parameter): i for i, parameter in enumerate(parameters)}  # hashing a tensor takes ten times as long
    state = {}
    for key, entry in optimizer.state.items():
        position = positions.get(id(key))
        if position is not None or not isinstance(key, torch.Tensor):
            at = key if position is None else position
            state[at] = flatten(entry, f"{name}.state.{at}", values)
    return {"state": state, "param_groups": flatten(plain_groups(optimizer), f"{name}.param_groups", values)}


def plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups, with numbers of parameters instead of parameters."""
    return [
        {key: len(value) if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]


def is_plain_optimizer(value: object) -> bool:
    """Return True for an optimizer with torch's own state_dict methods. Others may keep their state elsewhere."""
    kind = type(value)
    return (
        isinstance(value, torch.optim.Optimizer)
        and kind.state_dict is torch.optim.Optimizer.state_dict  # type: ignore[attr-defined]
        and kind.load_state_dict is torch.optim.Optimizer.load_state_dict  # type: ignore[attr-defined]
    )


def load_optimizer(name: str, optimizer: torch.optim.Optimizer, tree: Any, values: Captured) -> None:
    """Write into existing tensors, create missing ones, and remove those that the commit does not have.

    ``load_state_dict`` is not used: it keeps the tensors that it gets, and casts them to the parameter's dtype.
    """
    saved_groups = tree["param_groups"]
    live_sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [group["params"] for group in saved_groups]
    if live_sizes[: len(saved_sizes)] != saved_sizes:
        raise StateError(
            f"state.{name} has parameter groups of {live_sizes} parameters, and the commit has groups of "
            f"{saved_sizes}. Add the same groups before the first call of the function that is decorated with run."
        )
    del optimizer.param_groups[len(saved_groups) :]  # added after the commit
    used: set[str] = set()
    for i, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        others = {key: value for key, value in saved_group.items() if key != "params"}
        rebuilt = rebuild(others, values, group, None, f"{name}.param_groups.{i}", used)
        rebuilt["params"] = group["params"]
        group.clear()
        group.update(rebuilt)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for position, entry in tree["state"].items():
        key = parameters[position] if isinstance(position, int) else position
        device = key.device if isinstance(key, torch.Tensor) else None
        state[key] = rebuild(entry, values, optimizer.state.get(key), device, f"{name}.state.{position}", used)
    optimizer.state.clear()
    optimizer.state.update(state)
