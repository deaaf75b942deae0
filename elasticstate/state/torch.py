"""TorchState: modules, optimizers, and all other objects that a training job changes."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elasticstate.errors import StateError
from elasticstate.state.async_commit import is_captured, watch_steps
from elasticstate.state.base import State
from elasticstate.state.iterable_data import fault_of
from elasticstate.state.running_statistics import running_statistics
from elasticstate.state.values import Captured, Leaf, Row, Tree, Values, is_array, put

_leaf = functools.cache(Leaf)  # one for each device type, so that a pickle contains it once
_row = functools.lru_cache(1024)(Row)


class TorchState(State):
    """A state of the objects that PyTorch training consists of.

    * A module, without its DistributedDataParallel wrapper: parameters, all buffers (persistent or not), extra state.
    * An optimizer: state and parameter groups, with learning rates. A new worker builds the optimizer's state from the
      root's, without a step.
    * Any other object with ``state_dict()`` and ``load_state_dict()``: a scheduler, GradScaler, sampler, data loader.
    * Tensors and numpy arrays, and any object that can be pickled.

    ``restore()`` and ``sync()`` write in place. They never replace a parameter, a buffer, or a tensor of an optimizer
    that has the right shape.

    The constructor warns if there are no values, and about a data set that a StatefulDataLoader cannot resume
    correctly.

    Raises UsageError if a name cannot be the name of a value.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        callers_line = 2 if type(self).__init__ is TorchState.__init__ else 3
        if not values and type(self).capture is TorchState.capture:
            warnings.warn(
                "TorchState() has no values: a commit keeps nothing, and a restarted worker begins from scratch. Pass "
                "all that the training changes: TorchState(model=model, optimizer=optimizer).",
                stacklevel=callers_line,
            )
        for name, value in values.items():
            if fault := fault_of(value):
                warnings.warn(f"state.{name}: {fault}", stacklevel=callers_line)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            watch_steps()  # before a step is captured for a graph

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

    def _optimizer_owned(self) -> set[int]:
        """Return the ids of the parameters that the optimizers train, and of the tensors in the optimizers' state."""
        found: set[int] = set()
        for name in self._names:
            value = getattr(self, name)
            if _is_plain_optimizer(value) and not is_captured(value):
                found.update(id(p) for p in _parameters(value) if p.requires_grad)
                for entry in value.state.values():
                    found.update(map(id, entry.values() if isinstance(entry, dict) else ()))
        return found

    def check(self) -> None:
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                self.exclude_from_check(*running_statistics(name, _unwrap(value)))
        super().check()

    def _drop_gradients(self) -> None:
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.amp.GradScaler):
                value._per_optimizer_states.clear()  # else unscale_() raises "already been called"
            for parameter in _parameters(value):
                parameter.grad = None


# ------------------------------------------------------------------------------------------------- kinds of objects


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_plain_optimizer(value: object) -> bool:
    """Return True for an optimizer with torch's own state_dict methods. Others may keep their state elsewhere."""
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
    """Put the tensors of an object into ``values``, and return the rest of its state."""
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
        # _rebuild writes into the tensors of state_dict(). If these are the live tensors, they are restored by then. If
        # these are copies, nobody else uses them. load_state_dict() may keep tensors, so it never gets the commit's
        # own.
        live.load_state_dict(_rebuild(tree, values, live.state_dict(), None, name, set()))


# ---------------------------------------------------------------------------------------------------------- modules


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    wrapped: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return wrapped


class _Walk:
    """All tensors of a module by name, found in one walk. ``named_parameters`` and similar methods would take three."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.parameters_at, self.buffers_at = f"{name}.parameters.", f"{name}.buffers."
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.none: list[str] = []  # paths of registered buffers that are None
        self.transient: list[str] = []  # paths of buffers that are registered with persistent=False
        self.speaking: dict[torch.nn.Module, str] = {}  # modules with an extra state, and their paths
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
            else:
                self.none.append(f"{path}{key}")
        self.transient += [f"{path}{key}" for key in sorted(module._non_persistent_buffers_set)]
        for key, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{path}{key}.")

    def _ask(self, module: torch.nn.Module, path: str) -> None:
        """Use the module's own ``named_*`` methods, because its class overrides them."""
        for key, parameter in module.named_parameters(remove_duplicate=False):
            self.parameters[f"{self.parameters_at}{path}{key}"] = parameter
        for key, buffer in module.named_buffers(remove_duplicate=False):
            self.buffers[f"{self.buffers_at}{path}{key}"] = buffer
        for key, part in module.named_modules():
            if _habits(type(part))[1]:  # type: ignore[arg-type]
                self.speaking.setdefault(part, f"{path}{key}".removesuffix("."))


@functools.cache
def _habits(kind: Any) -> tuple[bool, bool]:
    """Return two flags for a class of modules: it uses torch's own ``named_*`` methods, and it has an extra state."""
    usual = all(getattr(kind, f) is getattr(torch.nn.Module, f) for f in _WALKS)
    return usual, kind.get_extra_state is not torch.nn.Module.get_extra_state


_WALKS = ("named_parameters", "named_buffers", "named_modules")


def _capture_module(name: str, module: torch.nn.Module, values: dict[str, Any]) -> Any:
    walk = _Walk(name, module)
    values.update(walk.parameters)
    values.update(walk.buffers)
    return {
        "devices": {path: buffer.device.type for path, buffer in walk.buffers.items() if not buffer.is_cpu},
        "none": walk.none,
        "transient": walk.transient,
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
        written = put(live[key], values, key)
        if written is not live[key]:  # the live parameter cannot be written in place
            live[key].data = written  # type: ignore[assignment]  # a parameter is a tensor
    _load_buffers(module, walk, tree, values)
    parts = dict(module.named_modules())
    used: set[str] = set()
    for path, extra in tree["extra"].items():
        parts[path].set_extra_state(_rebuild(extra, values, None, None, f"{name}.extra.{path}", used))


def _load_buffers(module: torch.nn.Module, walk: _Walk, tree: Any, values: Captured) -> None:
    """Give the module the buffers of the commit, including those that are None, and remove all other buffers."""
    saved = {key.removeprefix(walk.buffers_at): key for key in values if key.startswith(walk.buffers_at)}
    found = {key.removeprefix(walk.buffers_at) for key in walk.buffers}.union(walk.none)
    for path in found.difference(saved, tree["none"]):
        owner, name = _owner_of_buffer(module, path)
        delattr(owner, name)
    transient = set(tree["transient"])
    for path in tree["none"]:
        _set_buffer(module, path, None, path in transient)
    for path, key in saved.items():
        owner, name = _owner_of_buffer(module, path)
        live = owner._buffers.get(name)
        if live is None or not (isinstance(values, Values) and values.is_in(key, live)):
            device = live.device if live is not None else _home(module, tree["devices"].get(key, "cpu"))
            _set_buffer(module, path, put(live, values, key, device), path in transient)


def _owner_of_buffer(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def _set_buffer(module: torch.nn.Module, path: str, value: Any, is_transient: bool) -> None:
    """Register the buffer or set its value. Buffers may be registered late or change their shape, as caches do."""
    owner, name = _owner_of_buffer(module, path)
    if name in owner._buffers:
        setattr(owner, name, value)
    else:
        owner.register_buffer(name, value, persistent=not is_transient)


def _home(module: torch.nn.Module, device_type: str) -> torch.device:
    for parameter in module.parameters():
        if parameter.device.type == device_type:
            return parameter.device
    return torch.device(device_type)


# ------------------------------------------------------------------------------------------------------- optimizers


def _capture_optimizer(name: str, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> Any:
    """Return what ``Optimizer.state_dict`` returns: parameters are identified by position over all groups."""
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    positions = {id(parameter): i for i, parameter in enumerate(parameters)}  # hashing a tensor takes ten times as long
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
    """Write into existing tensors, create missing ones, and remove those that the commit does not have.

    ``load_state_dict`` is not used: it keeps the tensors that it gets, and casts them to the parameter's dtype.
    """
    saved_groups = tree["param_groups"]
    live_sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [group["params"] for group in saved_groups]
    if live_sizes[: len(saved_sizes)] != saved_sizes:
        raise StateError(
            f"state.{name} has parameter groups of {live_sizes} parameters, and the commit has groups of "
            f"{saved_sizes}. Add the same groups before the first call of the function that is decorated with run"
        )
    del optimizer.param_groups[len(saved_groups) :]  # added after the commit
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
    """Put the tensors and arrays of nested containers into ``values`` under their paths. Return the remaining tree."""
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
    """Return a free name for the value at ``path``. A path may be taken already: ``{"a.b": x, "a": {"b": y}}``."""
    while path in taken:
        path += "'"
    return path


def _rebuild(tree: Any, values: Captured, live: Any, device: torch.device | None, path: str, used: set[str]) -> Any:
    """Reverse ``_flatten``: write tensors into those at the same place in ``live``, or create new ones.

    ``device``: for new tensors that were not on the CPU; None is the present device of their type. ``used``: the names
    met so far, which make the generated names equal to those of ``_flatten``.
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
