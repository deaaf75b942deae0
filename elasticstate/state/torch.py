"""TorchState: modules, optimizers, and whatever else a training job has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elasticstate.errors import StateError
from elasticstate.state.base import State
from elasticstate.state.snapshot import Captured, is_array, write_into


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stands in a tree where a tensor or array was: its name among the captured values, and the kind of its device."""

    name: str
    device_type: str


@dataclass(frozen=True, slots=True)
class _Tree:
    """Nested dicts, lists and tuples with leaves: the state of one object without its tensors."""

    tree: Any


class TorchState(State):
    """A state of the things that training in PyTorch is made of.

    * a module (a DistributedDataParallel wrapper is taken off): its parameters, all its buffers, persistent or not, and
      its extra state;
    * an optimizer: its state and its parameter groups, learning rates and all. A newcomer's state is built from the
      root's, without a step;
    * whatever else has ``state_dict()`` and ``load_state_dict()``: a scheduler, GradScaler, sampler, data loader;
    * tensors and numpy arrays; and anything that can be pickled.

    Everything that exists is written in place: ``restore()`` and ``sync()`` never replace a parameter, a buffer, or a
    tensor of an optimizer that has the right shape.
    """

    def capture(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            if is_array(value):
                values[name] = value
            elif _is_stateful(value):
                values[name] = _Tree(_flatten(_content(value), name, values))
            else:
                values[name] = value
        return values

    def apply(self, values: Captured) -> None:
        self._check_names(values)
        for name in self._names:
            live, saved = getattr(self, name), values[name]
            if isinstance(saved, _Tree):
                if not _is_stateful(live):
                    raise StateError(f"state.{name} is a {type(live).__name__} now and cannot take the commit's state")
                _load(name, live, saved.tree, values)
            else:
                setattr(self, name, write_into(live, saved) if is_array(saved) else saved)

    def _drop_gradients(self) -> None:
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.amp.GradScaler):
                value._per_optimizer_states.clear()  # "unscale_() has already been called": of the step that is gone
            for parameter in _parameters(value):
                parameter.grad = None


# ------------------------------------------------------------------------------------------------- kinds of objects


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_plain_optimizer(value: object) -> bool:
    """An optimizer whose state is where torch puts it; one that overrides its state_dict knows better."""
    kind = type(value)
    return (
        isinstance(value, torch.optim.Optimizer)
        and kind.state_dict is torch.optim.Optimizer.state_dict  # type: ignore[attr-defined]
        and kind.load_state_dict is torch.optim.Optimizer.load_state_dict  # type: ignore[attr-defined]
    )


def _parameters(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]


def _content(value: Any) -> Any:
    """The state of an object as nested containers."""
    if isinstance(value, torch.nn.Module):
        return _module_content(_unwrap(value))
    if _is_plain_optimizer(value):
        return _optimizer_content(value)
    return value.state_dict()


def _load(name: str, live: Any, tree: Any, values: Captured) -> None:
    if isinstance(live, torch.nn.Module):
        _load_module(name, _unwrap(live), tree, values)
    elif _is_plain_optimizer(live):
        _load_optimizer(name, live, tree, values)
    else:
        # Tensors are written into those of state_dict(): if they are the live ones, all is done by then; if they are
        # copies, they are nobody else's. Never the commit's own, which load_state_dict might keep.
        live.load_state_dict(_rebuild(tree, values, live.state_dict(), None))


# ---------------------------------------------------------------------------------------------------------- modules


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    wrapped: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return wrapped


def _module_content(module: torch.nn.Module) -> dict[str, Any]:
    return {
        "parameters": dict(module.named_parameters(remove_duplicate=False)),
        "buffers": dict(module.named_buffers(remove_duplicate=False)),
        "extra": {
            path: part.get_extra_state()
            for path, part in module.named_modules()
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state
        },
    }


def _load_module(name: str, module: torch.nn.Module, tree: Any, values: Captured) -> None:
    saved: dict[str, _Leaf] = tree["parameters"]
    live = dict(module.named_parameters(remove_duplicate=False))
    if saved.keys() != live.keys():
        differing = ", ".join(sorted(saved.keys() ^ live.keys())[:5])
        raise StateError(f"state.{name} and the commit have different parameters: {differing}")
    for path, leaf in saved.items():
        value = values[leaf.name]
        if live[path].shape != value.shape or live[path].dtype != value.dtype:
            raise StateError(
                f"state.{name}: {path} is {tuple(live[path].shape)} of {live[path].dtype}, "
                f"in the commit {tuple(value.shape)} of {value.dtype}"
            )
    for path, leaf in saved.items():
        write_into(live[path], values[leaf.name])
    for path, leaf in tree["buffers"].items():
        _load_buffer(module, path, leaf, values)
    parts = dict(module.named_modules())
    for path, extra in tree["extra"].items():
        parts[path].set_extra_state(_rebuild(extra, values, None, None))


def _load_buffer(module: torch.nn.Module, path: str, leaf: _Leaf, values: Captured) -> None:
    """Buffers may come late or change their shape (caches do): then the owner gets a new one."""
    owner_path, _, name = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    live = owner._buffers.get(name)
    device = live.device if live is not None else _home(module, leaf)
    written = write_into(live, values[leaf.name], device)
    if name in owner._buffers:
        setattr(owner, name, written)
    else:
        owner.register_buffer(name, written, persistent=False)  # type: ignore[arg-type]  # a buffer is a tensor


def _home(module: torch.nn.Module, leaf: _Leaf) -> torch.device:
    for parameter in module.parameters():
        if parameter.device.type == leaf.device_type:
            return parameter.device
    return torch.device(leaf.device_type)


# ------------------------------------------------------------------------------------------------------- optimizers


def _optimizer_content(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ``Optimizer.state_dict`` gives: parameters by their position over all groups."""
    positions = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    return {
        "state": {
            positions[key] if isinstance(key, torch.Tensor) else key: entry
            for key, entry in optimizer.state.items()
            if not isinstance(key, torch.Tensor) or key in positions
        },
        "param_groups": [
            {key: len(value) if key == "params" else value for key, value in group.items()}
            for group in optimizer.param_groups
        ],
    }


def _load_optimizer(name: str, optimizer: torch.optim.Optimizer, tree: Any, values: Captured) -> None:
    """Write into what is there, make what is not, take away what the commit does not have.

    Not by ``load_state_dict``: it keeps the tensors that it is given, and casts them to the parameter's dtype.
    """
    saved_groups = tree["param_groups"]
    live_sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [group["params"] for group in saved_groups]
    if live_sizes != saved_sizes:
        raise StateError(f"state.{name} has groups of {live_sizes} parameters, the commit of {saved_sizes}")
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        rebuilt = _rebuild({k: v for k, v in saved_group.items() if k != "params"}, values, group, None)
        rebuilt["params"] = group["params"]
        group.clear()
        group.update(rebuilt)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for position, entry in tree["state"].items():
        key = parameters[position] if isinstance(position, int) else position
        device = key.device if isinstance(key, torch.Tensor) else None
        state[key] = _rebuild(entry, values, optimizer.state.get(key), device)
    optimizer.state.clear()
    optimizer.state.update(state)


# ------------------------------------------------------------------------------------------------ nested containers


def _flatten(value: Any, path: str, values: dict[str, Any]) -> Any:
    """Put the tensors and arrays of nested containers into ``values`` under their paths; returns the tree left."""
    if is_array(value):
        while path in values:  # {"a.b": x, "a": {"b": y}}
            path += "'"
        values[path] = value
        return _Leaf(path, value.device.type if isinstance(value, torch.Tensor) else "cpu")
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _flatten(item, f"{path}.{key}", values)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_flatten(item, f"{path}.{i}", values) for i, item in enumerate(value))
    return value


def _rebuild(tree: Any, values: Captured, live: Any, device: torch.device | None) -> Any:
    """The reverse of ``_flatten``: tensors are written into those at the same place in ``live``, or made anew.

    ``device`` is where new tensors go that were not on the CPU; None: the present device of their kind.
    """
    if isinstance(tree, _Leaf):
        here = device if device is not None and device.type == tree.device_type else torch.device(tree.device_type)
        return write_into(live, values[tree.name], here)
    if type(tree) in (dict, OrderedDict):
        inside = live if isinstance(live, dict) else {}
        return type(tree)((key, _rebuild(item, values, inside.get(key), device)) for key, item in tree.items())
    if type(tree) in (list, tuple):
        beside = live if isinstance(live, list | tuple) and len(live) == len(tree) else [None] * len(tree)
        return type(tree)(_rebuild(t, values, one, device) for t, one in zip(tree, beside, strict=True))
    return tree
