"""State of a module, in a commit: parameters, all buffers, and the extra state of its parts."""

from __future__ import annotations

import functools
from typing import Any

import torch

from elasticstate.compat import modules
from elasticstate.errors import StateError
from elasticstate.state.containers import flatten, rebuild
from elasticstate.state.values import Captured, is_loaded, load_value


class Walk:
    """All tensors of a module by name, found in one walk. ``named_parameters`` and similar methods would take three.

    The names are those without ``torch.compile``: a checkpoint of a compiled module loads into one that is not, and
    the other way round.

    Args:
        parameters_at: what the names of parameters begin with.
        buffers_at: the same for buffers.
    """

    def __init__(self, module: torch.nn.Module, parameters_at: str, buffers_at: str) -> None:
        self.parameters_at, self.buffers_at = parameters_at, buffers_at
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.none: list[str] = []  # paths of registered buffers that are None
        self.transient: list[str] = []  # paths of buffers that are registered with persistent=False
        self.with_extra_state: dict[torch.nn.Module, str] = {}  # modules with an extra state, and their paths
        self._visit(module, "")

    def _visit(self, module: torch.nn.Module, path: str) -> None:
        usual, has_extra_state, is_compiled = _class_facts(type(module))  # type: ignore[arg-type]  # a class is hashable
        if not usual:
            self._visit_by_public_methods(module, path)
            return
        if is_compiled:
            for child in modules.children_of(module).values():
                assert child is not None
                self._visit(child, path)
            return
        if has_extra_state:
            self.with_extra_state.setdefault(module, path.removesuffix("."))
        for key, parameter in modules.parameters_of(module).items():
            if parameter is not None:
                self.parameters[f"{self.parameters_at}{path}{key}"] = parameter
        for key, buffer in modules.buffers_of(module).items():
            if buffer is not None:
                self.buffers[f"{self.buffers_at}{path}{key}"] = buffer
            else:
                self.none.append(f"{path}{key}")
        self.transient += [f"{path}{key}" for key in sorted(modules.transient_buffers_of(module))]
        for key, child in modules.children_of(module).items():
            if child is not None:
                self._visit(child, f"{path}{key}.")

    def _visit_by_public_methods(self, module: torch.nn.Module, path: str) -> None:
        """Use the module's own ``named_*`` methods, because its class overrides them."""
        for key, parameter in module.named_parameters(remove_duplicate=False):
            self.parameters[f"{self.parameters_at}{path}{key}"] = parameter
        for key, buffer in module.named_buffers(remove_duplicate=False):
            self.buffers[f"{self.buffers_at}{path}{key}"] = buffer
        for key, part in module.named_modules():
            if _class_facts(type(part))[1]:  # type: ignore[arg-type]
                self.with_extra_state.setdefault(part, f"{path}{key}".removesuffix("."))


@functools.cache
def _class_facts(kind: Any) -> tuple[bool, bool, bool]:
    """Return three flags for a class of modules: it uses torch's own ``named_*`` methods, it has an extra state, and it
    is what ``torch.compile`` returns."""
    usual = modules.has_registries() and all(getattr(kind, f) is getattr(torch.nn.Module, f) for f in _WALK_METHODS)
    has_extra_state = kind.get_extra_state is not torch.nn.Module.get_extra_state
    return usual, has_extra_state, modules.compiles_another(kind)


def is_usual(module: torch.nn.Module) -> bool:
    """Return True if the module uses torch's own ``named_*`` methods, so that its registries contain its tensors."""
    return _class_facts(type(module))[0]  # type: ignore[arg-type]


_WALK_METHODS = ("named_parameters", "named_buffers", "named_modules")


def _walk(name: str, module: torch.nn.Module) -> Walk:
    return Walk(module, f"{name}.parameters.", f"{name}.buffers.")


def capture_module(name: str, module: torch.nn.Module, values: dict[str, Any]) -> Any:
    """Put the tensors of a module into ``values``, and return the rest of its state."""
    walk = _walk(name, module)
    values.update(walk.parameters)
    values.update(walk.buffers)
    return {
        "devices": {path: buffer.device.type for path, buffer in walk.buffers.items() if not buffer.is_cpu},
        "none": walk.none,
        "transient": walk.transient,
        "extra": {
            path: flatten(part.get_extra_state(), f"{name}.extra.{path}", values)
            for part, path in walk.with_extra_state.items()
        },
    }


def load_module(name: str, module: torch.nn.Module, tree: Any, values: Captured) -> None:
    """Write what ``capture_module`` captured into the module, in place where that is possible."""
    walk = _walk(name, module)
    live = walk.parameters
    saved = [key for key in values if key.startswith(walk.parameters_at)]
    if live.keys() != set(saved):
        differing = sorted(key.removeprefix(walk.parameters_at) for key in live.keys() ^ set(saved))
        raise StateError(
            f"state.{name} and the commit have different parameters: {', '.join(differing[:5])}. Construct the same "
            f"module as the worker that committed."
        )
    left = [key for key in saved if not is_loaded(live[key], values, key)]
    for key in left:
        value = values[key]
        if live[key].shape != value.shape or live[key].dtype != value.dtype:
            raise StateError(
                f"state.{name}: {key.removeprefix(walk.parameters_at)} is {tuple(live[key].shape)} of "
                f"{live[key].dtype}, in the commit {tuple(value.shape)} of {value.dtype}. Construct the same module as "
                f"the worker that committed."
            )
    for key in left:
        written = load_value(live[key], values, key)
        if written is not live[key]:  # the live parameter cannot be written in place
            live[key].data = written  # type: ignore[assignment]  # a parameter is a tensor
    _load_buffers(module, walk, tree, values)
    parts = {path: part for part, path in walk.with_extra_state.items()}
    used: set[str] = set()
    for path, extra in tree["extra"].items():
        parts[path].set_extra_state(rebuild(extra, values, None, None, f"{name}.extra.{path}", used))


def _load_buffers(module: torch.nn.Module, walk: Walk, tree: Any, values: Captured) -> None:
    """Give the module the buffers of the commit, including those that are None, and remove all other buffers."""
    saved = {key.removeprefix(walk.buffers_at): key for key in values if key.startswith(walk.buffers_at)}
    found = {key.removeprefix(walk.buffers_at) for key in walk.buffers}.union(walk.none)
    for path in found.difference(saved, tree["none"]):
        owner, name = owner_of_buffer(module, path)
        delattr(owner, name)
    transient = set(tree["transient"])
    for path in tree["none"]:
        set_buffer(module, path, None, path in transient)
    for path, key in saved.items():
        owner, name = owner_of_buffer(module, path)
        live = owner.get_buffer(name) if modules.has_buffer(owner, name) else None
        if live is None or not is_loaded(live, values, key):
            device = live.device if live is not None else home_of(module, tree["devices"].get(key, "cpu"))
            set_buffer(module, path, load_value(live, values, key, device), path in transient)


def owner_of_buffer(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    *parts, name = path.split(".")
    owner = _compiled(module)
    for part in parts:
        owner = _compiled(owner.get_submodule(part))
    return owner, name


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or else the module itself."""
    while modules.compiles_another(type(module)):
        (child,) = modules.children_of(module).values()
        assert child is not None
        module = child
    return module


def set_buffer(module: torch.nn.Module, path: str, value: Any, is_transient: bool) -> None:
    """Register the buffer or set its value. Buffers may be registered late or change their shape, as caches do."""
    owner, name = owner_of_buffer(module, path)
    if modules.has_buffer(owner, name):
        setattr(owner, name, value)
    else:
        owner.register_buffer(name, value, persistent=not is_transient)


def home_of(module: torch.nn.Module, device_type: str) -> torch.device:
    for parameter in module.parameters():
        if parameter.device.type == device_type:
            return parameter.device
    return torch.device(device_type)
