"""TorchState: modules, optimizers, and whatever else a training job has."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elasticstate.errors import StateError
from elasticstate.state.base import State
from elasticstate.state.overlap import is_captured, watch_steps
from elasticstate.state.values import Captured, Leaf, Row, Tree, Values, is_array, put

_leaf = functools.cache(Leaf)  # one for each kind of device: a pickle has it once
_row = functools.lru_cache(1024)(Row)


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

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            watch_steps()  # before one is captured for a graph

    def capture(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            if is_array(value):
                values[name] = value
            elif _is_stateful(value):
                values[name] = Tree(_capture(name, value, values))
            else:
                values[name] = value
        return values

    def apply(self, values: Captured) -> None:
        self._check_names(values)
        for name in self._names:
            live, saved = getattr(self, name), values[name]
            if isinstance(saved, Tree):
                if not _is_stateful(live):
                    raise StateError(f"state.{name} is a {type(live).__name__} now and cannot take the commit's state")
                _load(name, live, saved.tree, values)
            else:
                setattr(self, name, put(live, values, name) if is_array(saved) else saved)

    def _steady(self) -> set[int]:
        """What the optimizers among the values train, and what they keep for it."""
        found: set[int] = set()
        for name in self._names:
            value = getattr(self, name)
            if _is_plain_optimizer(value) and not is_captured(value):
                found.update(id(p) for p in _parameters(value) if p.requires_grad)
                for entry in value.state.values():
                    found.update(map(id, entry.values() if isinstance(entry, dict) else ()))
        return found

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


def _capture(name: str, value: Any, values: dict[str, Any]) -> Any:
    """Put the tensors of an object into ``values``; returns the rest of its state."""
    if isinstance(value, torch.nn.Module):
        return _capture_module(name, _unwrap(value), values)
    if _is_plain_optimizer(value):
        return _capture_optimizer(name, value, values)
    return _flatten(value.state_dict(), name, values)


def _load(name: str, live: Any, tree: Any, values: Captured) -> None:
    if isinstance(live, torch.nn.Module):
        _load_module(name, _unwrap(live), tree, values)
    elif _is_plain_optimizer(live):
        _load_optimizer(name, live, tree, values)
    else:
        # Tensors are written into those of state_dict(): if they are the live ones, all is done by then; if they are
        # copies, they are nobody else's. Never the commit's own, which load_state_dict might keep.
        live.load_state_dict(_rebuild(tree, values, live.state_dict(), None, name, set()))


# ---------------------------------------------------------------------------------------------------------- modules


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    wrapped: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return wrapped


class _Walk:
    """All tensors of a module by name, in one walk: ``named_parameters`` and its like would take three."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.parameters_at, self.buffers_at = f"{name}.parameters.", f"{name}.buffers."
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.speaking: dict[torch.nn.Module, str] = {}  # those with an extra state, and their paths
        self._visit(module, "")

    def _visit(self, module: torch.nn.Module, path: str) -> None:
        usual, speaks = _habits(type(module))  # type: ignore[arg-type]  # a class is hashable
        if not usual:
            self._ask(module, path)
            return
        if speaks:
            self.speaking.setdefault(module, path.removesuffix("."))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                self.parameters[f"{self.parameters_at}{path}{key}"] = parameter
        for key, buffer in module._buffers.items():
            if buffer is not None:
                self.buffers[f"{self.buffers_at}{path}{key}"] = buffer
        for key, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{path}{key}.")

    def _ask(self, module: torch.nn.Module, path: str) -> None:
        """It has its own opinion about what its parts are."""
        for key, parameter in module.named_parameters(remove_duplicate=False):
            self.parameters[f"{self.parameters_at}{path}{key}"] = parameter
        for key, buffer in module.named_buffers(remove_duplicate=False):
            self.buffers[f"{self.buffers_at}{path}{key}"] = buffer
        for key, part in module.named_modules():
            if _habits(type(part))[1]:  # type: ignore[arg-type]
                self.speaking.setdefault(part, f"{path}{key}".removesuffix("."))


@functools.cache
def _habits(kind: Any) -> tuple[bool, bool]:
    """Whether a kind of module leaves the walk through its parts to torch, and whether it has an extra state."""
    usual = all(getattr(kind, f) is getattr(torch.nn.Module, f) for f in _WALKS)
    return usual, kind.get_extra_state is not torch.nn.Module.get_extra_state


_WALKS = ("named_parameters", "named_buffers", "named_modules")


def _capture_module(name: str, module: torch.nn.Module, values: dict[str, Any]) -> Any:
    walk = _Walk(name, module)
    values.update(walk.parameters)
    values.update(walk.buffers)
    return {
        "devices": {path: buffer.device.type for path, buffer in walk.buffers.items() if not buffer.is_cpu},
        "extra": {
            path: _flatten(part.get_extra_state(), f"{name}.extra.{path}", values)
            for part, path in walk.speaking.items()
        },
    }


def _load_module(name: str, module: torch.nn.Module, tree: Any, values: Captured) -> None:
    walk = _Walk(name, module)
    live = walk.parameters
    saved = [key for key in values if key.startswith(walk.parameters_at)]
    if live.keys() != set(saved):
        differing = sorted(key.removeprefix(walk.parameters_at) for key in live.keys() ^ set(saved))
        raise StateError(f"state.{name} and the commit have different parameters: {', '.join(differing[:5])}")
    left = [key for key in saved if not (isinstance(values, Values) and values.is_in(key, live[key]))]
    for key in left:
        value = values[key]
        if live[key].shape != value.shape or live[key].dtype != value.dtype:
            raise StateError(
                f"state.{name}: {key.removeprefix(walk.parameters_at)} is {tuple(live[key].shape)} of "
                f"{live[key].dtype}, in the commit {tuple(value.shape)} of {value.dtype}"
            )
    for key in left:
        put(live[key], values, key)
    for key in [key for key in values if key.startswith(walk.buffers_at)]:
        _load_buffer(module, key.removeprefix(walk.buffers_at), key, tree["devices"].get(key, "cpu"), values)
    parts = dict(module.named_modules())
    used: set[str] = set()
    for path, extra in tree["extra"].items():
        parts[path].set_extra_state(_rebuild(extra, values, None, None, f"{name}.extra.{path}", used))


def _load_buffer(module: torch.nn.Module, path: str, key: str, device_type: str, values: Captured) -> None:
    """Buffers may come late or change their shape (caches do): then the owner gets a new one."""
    owner_path, _, name = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    live = owner._buffers.get(name)
    if live is not None and isinstance(values, Values) and values.is_in(key, live):
        return
    device = live.device if live is not None else _home(module, device_type)
    written = put(live, values, key, device)
    if name in owner._buffers:
        setattr(owner, name, written)
    else:
        owner.register_buffer(name, written, persistent=False)  # type: ignore[arg-type]  # a buffer is a tensor


def _home(module: torch.nn.Module, device_type: str) -> torch.device:
    for parameter in module.parameters():
        if parameter.device.type == device_type:
            return parameter.device
    return torch.device(device_type)


# ------------------------------------------------------------------------------------------------------- optimizers


def _capture_optimizer(name: str, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> Any:
    """What ``Optimizer.state_dict`` gives: parameters by their position over all groups."""
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    positions = {id(parameter): i for i, parameter in enumerate(parameters)}  # to hash a tensor takes ten times as long
    state = {}
    for key, entry in optimizer.state.items():
        position = positions.get(id(key))
        if position is not None or not isinstance(key, torch.Tensor):
            at = key if position is None else position
            state[at] = _flatten(entry, f"{name}.state.{at}", values)
    groups = [
        {key: len(value) if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": _flatten(groups, f"{name}.param_groups", values)}


def _load_optimizer(name: str, optimizer: torch.optim.Optimizer, tree: Any, values: Captured) -> None:
    """Write into what is there, make what is not, take away what the commit does not have.

    Not by ``load_state_dict``: it keeps the tensors that it is given, and casts them to the parameter's dtype.
    """
    saved_groups = tree["param_groups"]
    live_sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [group["params"] for group in saved_groups]
    if live_sizes != saved_sizes:
        raise StateError(f"state.{name} has groups of {live_sizes} parameters, the commit of {saved_sizes}")
    used: set[str] = set()
    for i, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        others = {key: value for key, value in saved_group.items() if key != "params"}
        rebuilt = _rebuild(others, values, group, None, f"{name}.param_groups.{i}", used)
        rebuilt["params"] = group["params"]
        group.clear()
        group.update(rebuilt)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for position, entry in tree["state"].items():
        key = parameters[position] if isinstance(position, int) else position
        device = key.device if isinstance(key, torch.Tensor) else None
        state[key] = _rebuild(entry, values, optimizer.state.get(key), device, f"{name}.state.{position}", used)
    optimizer.state.clear()
    optimizer.state.update(state)


# ------------------------------------------------------------------------------------------------ nested containers


def _flatten(value: Any, path: str, values: dict[str, Any]) -> Any:
    """Put the tensors and arrays of nested containers into ``values`` under their paths; returns the tree left."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        for key, item in value.items():
            if type(key) is not str or not isinstance(item, torch.Tensor) or not item.is_cpu:
                return kind((key, _flatten(item, f"{path}.{key}", values)) for key, item in value.items())
        for key, tensor in value.items():
            values[_free(f"{path}.{key}", values)] = tensor
        return _row(kind, tuple(value))
    if kind is list or kind is tuple:
        return kind(_flatten(item, f"{path}.{i}", values) for i, item in enumerate(value))
    if is_array(value):
        values[_free(path, values)] = value
        return _leaf(value.device.type if isinstance(value, torch.Tensor) else "cpu")
    return value


def _free(path: str, taken: Container[str]) -> str:
    """A name for what is at ``path``, which may be taken: ``{"a.b": x, "a": {"b": y}}``."""
    while path in taken:
        path += "'"
    return path


def _rebuild(tree: Any, values: Captured, live: Any, device: torch.device | None, path: str, used: set[str]) -> Any:
    """The reverse of ``_flatten``: tensors are written into those at the same place in ``live``, or made anew.

    ``device`` is where new tensors go that were not on the CPU; None: the present device of their kind. ``used``: names
    met so far; with it they come out as ``_flatten`` made them.
    """
    if isinstance(tree, Leaf):
        path = _free(path, used)
        used.add(path)
        here = device if device is not None and device.type == tree.device_type else torch.device(tree.device_type)
        return put(live, values, path, here)
    if isinstance(tree, Row):
        tree = tree.kind((key, _leaf("cpu")) for key in tree.keys)
    if type(tree) in (dict, OrderedDict):
        inside = live if isinstance(live, dict) else {}
        return type(tree)(
            (key, _rebuild(item, values, inside.get(key), device, f"{path}.{key}", used)) for key, item in tree.items()
        )
    if type(tree) in (list, tuple):
        beside = live if isinstance(live, list | tuple) and len(live) == len(tree) else [None] * len(tree)
        return type(tree)(
            _rebuild(item, values, one, device, f"{path}.{i}", used)
            for i, (item, one) in enumerate(zip(tree, beside, strict=True))
        )
    return tree
