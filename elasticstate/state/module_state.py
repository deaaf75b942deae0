"""State of a module, in a commit: parameters, all buffers, the extra state of its parts, and their modes.

Modes are ``training`` of each module and ``requires_grad`` of each parameter and buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elasticstate.compat import modules
from elasticstate.compat.modules import NORMS
from elasticstate.compat.torch_tensors import requires_grad_of
from elasticstate.errors import StateError
from elasticstate.state.values import Captured, Load, Values, flatten, is_loaded, load_value, rebuild

OR_HOOK = ", or change it in a function passed to state.register_restore_pre_hook()"
"""End of errors about a structure that the training has changed."""


class Walk:
    """All tensors of a module by name, found in one walk. ``named_parameters`` and similar methods would take three.

    The names are those without ``torch.compile``: a checkpoint of a compiled module loads into one that is not, and
    the other way round. ``parameters_at``, ``buffers_at``: what the names begin with.
    """

    def __init__(self, module: torch.nn.Module, parameters_at: str, buffers_at: str) -> None:
        self.parameters_at, self.buffers_at = parameters_at, buffers_at
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.none: list[str] = []  # paths of registered buffers that are None
        self.transient: list[str] = []  # paths of buffers that are registered with persistent=False
        self.with_extra_state: dict[torch.nn.Module, str] = {}  # modules with an extra state, and their paths
        self.evaluating: list[str] = []  # paths of modules in eval mode
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
        if not module.training:
            self.evaluating.append(path.removesuffix("."))
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
            if not part.training:
                self.evaluating.append(f"{path}{key}".removesuffix("."))


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


def parameters_of(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module by their names in a commit. Each name of a shared parameter counts."""
    return _walk(name, module).parameters


def registries_of(module: torch.nn.Module) -> list[Any] | None:
    """Return the dicts from which the names of the parameters follow; None if the module has methods of its own."""
    found: list[Any] = []
    for part in module.modules():
        if not is_usual(part):
            return None
        found += [modules.parameters_of(part), modules.children_of(part)]
    return found


def capture_module(name: str, module: torch.nn.Module, values: dict[str, Any]) -> Any:
    """Put the tensors of a module into ``values``, and return the rest of its state."""
    walk = _walk(name, module)
    values.update(walk.parameters)
    values.update(walk.buffers)
    devices = {path: buffer.device.type for path, buffer in walk.buffers.items() if not buffer.is_cpu}
    return {**rest_of(walk, walk.parameters, f"{name}.extra", values), "devices": devices}


def load_module(name: str, module: torch.nn.Module, tree: Any, values: Captured) -> None:
    """Write what ``capture_module`` captured into the module, in place where that is possible."""
    walk = _walk(name, module)
    live = walk.parameters
    saved = [key for key in values if key.startswith(walk.parameters_at)]
    if live.keys() != set(saved):
        differing = sorted(key.removeprefix(walk.parameters_at) for key in live.keys() ^ set(saved))
        raise StateError(
            f"state.{name} and the commit have different parameters: {', '.join(differing[:5])}. Construct the same "
            f"module as the worker that committed{OR_HOOK}."
        )
    left = [key for key in saved if not is_loaded(live[key], values, key)]
    for key in left:
        value = values[key]
        if live[key].shape != value.shape:
            raise StateError(
                f"state.{name}: {key.removeprefix(walk.parameters_at)} is {tuple(live[key].shape)}, in the commit "
                f"{tuple(value.shape)}. Construct the same module as the worker that committed{OR_HOOK}."
            )
    for key in left:
        written = load_value(live[key], values, key)
        if written is not live[key]:  # it cannot be written in place, or has another dtype: the module was cast
            replace_content(live[key], written)  # type: ignore[arg-type]  # a parameter is a tensor
    load_modes(module, walk, live, tree)
    buffers = [key for key in values if key.startswith(walk.buffers_at)]
    devices = {key.removeprefix(walk.buffers_at): tree["devices"].get(key, "cpu") for key in buffers}
    load_buffers(module, walk, tree, devices, lambda buffer, key, device: load_value(buffer, values, key, device))
    parts = {path: part for part, path in walk.with_extra_state.items()}
    used: set[str] = set()
    for path, extra in tree["extra"].items():
        parts[path].set_extra_state(rebuild(extra, values, None, None, f"{name}.extra.{path}", used))


def require_same_ties(parameters: Mapping[str, torch.Tensor], values: Captured) -> None:
    """Raise StateError if two parameters are one tensor, and two in the commit, or the other way round.

    ``parameters``: those of all modules of the state, by their names in a commit.
    """
    if not isinstance(values, Values):
        return
    if parameters.keys() <= values.loaded.keys():  # nearly always: each has been written at its own place
        return
    saved: dict[int, tuple[str, int]] = {}
    live: dict[object, tuple[str, int]] = {}
    for name, tensor in parameters.items():
        entry, address = values.entries.get(name), tensor.data_ptr()
        if entry is None or not entry.size_bytes or not address:
            continue
        other, its_address = saved.setdefault(entry.offset, (name, address))
        if its_address != address:
            raise StateError(f"state.{other} and state.{name} are one tensor in the commit, and two here{_TIE}")
        same = address, tensor.shape, tensor.stride(), tensor.dtype  # as layout.lay_out tells tensors apart
        other, its_offset = live.setdefault(same, (name, entry.offset))
        if its_offset != entry.offset:
            raise StateError(f"state.{other} and state.{name} are one tensor here, and two in the commit{_TIE}")


_TIE = f". Tie the parameters as the worker that committed has{OR_HOOK}."


def rest_of(
    walk: Walk, parameters: Mapping[str, torch.Tensor], extra_at: str, values: dict[str, Any]
) -> dict[str, Any]:
    """Return what belongs to a module besides its tensors: the paths of all parts in eval mode, the names of parameters
    that do not require gradients, and those of buffers that do, are None, or are not persistent; and the extra states,
    whose tensors are put into ``values``, with names that begin with ``extra_at``."""
    at = len(walk.parameters_at)
    flags = requires_grad_of(list(parameters.values()))
    frozen = [] if flags.all() else [name[at:] for name, flag in zip(parameters, flags, strict=True) if not flag]
    return {
        "evaluating": walk.evaluating,
        "frozen": frozen,
        "trained": [name[len(walk.buffers_at) :] for name, buffer in walk.buffers.items() if requires_grad(buffer)],
        "none": walk.none,
        "transient": walk.transient,
        "extra": {
            path: flatten(part.get_extra_state(), f"{extra_at}.{path}", values)
            for part, path in walk.with_extra_state.items()
        },
    }


def load_modes(module: torch.nn.Module, walk: Walk, parameters: Mapping[str, torch.Tensor], tree: Any) -> None:
    """Give a module the modes of the commit. No ``train()`` is called: a class may override it."""
    if "evaluating" not in tree:  # a commit of an older version
        return
    evaluating, frozen, at = set(tree["evaluating"]), set(tree["frozen"]), len(walk.parameters_at)
    for path, part in parts_of(module):
        if part.training == (path in evaluating):
            part.training = path not in evaluating
    if not frozen and requires_grad_of(list(parameters.values())).all():  # nearly always
        return
    for name, parameter in parameters.items():
        set_requires_grad(parameter, name[at:] not in frozen)


def replace_content(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Give a tensor, which optimizers may refer to, the memory of another one."""
    if not (content.is_floating_point() or content.is_complex()):
        set_requires_grad(tensor, False)
    tensor.data = content


def flag_of(name: str) -> str:
    """Return the name of the ``requires_grad`` of a tensor that is a value of the state."""
    return f"{name}.requires_grad"


def requires_grad(tensor: torch.Tensor) -> bool:
    """Return True for a leaf that requires gradients. For other tensors, it follows from how they were computed."""
    return tensor.requires_grad and tensor.is_leaf


def load_bare(name: str, live: Any, values: Captured) -> Any:
    """Return a tensor or array that is a value of the state, with the content of the commit: the live object, if that
    can have it."""
    value: Any = load_value(live, values, name)
    if isinstance(live, torch.nn.Parameter) and value is not live:  # of another shape or dtype
        replace_content(live, value)
        value = live
    if isinstance(value, torch.Tensor) and not value.is_leaf:  # its graph is that of the attempt that is given up
        value = value.detach()
    if isinstance(value, torch.Tensor) and flag_of(name) in values:
        set_requires_grad(value, values[flag_of(name)])
    return value


def set_requires_grad(tensor: torch.Tensor, requires_grad: bool) -> None:
    """Set the flag of a leaf. The one of a computed tensor follows from how it was computed."""
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        tensor.requires_grad_(requires_grad)


def parts_of(
    module: torch.nn.Module, path: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the module and all modules in it with their paths, named as ``Walk`` does. A module that ``torch.compile``
    has wrapped has the path of its wrapper. ``remove_duplicate``: of modules whose class overrides ``named_modules``.
    """
    usual, _, is_compiled = _class_facts(type(module))  # type: ignore[arg-type]
    if not usual:
        named = module.named_modules(remove_duplicate=remove_duplicate)
        yield from ((f"{path}{key}".removesuffix("."), part) for key, part in named)
        return
    yield path.removesuffix("."), module
    for key, child in modules.children_of(module).items():
        if child is not None:
            yield from parts_of(child, path if is_compiled else f"{path}{key}.", remove_duplicate)


def load_buffers(module: torch.nn.Module, walk: Walk, tree: Any, saved: Mapping[str, str], load: Load) -> None:
    """Give the module the buffers of the commit, including those that are None, and remove all other buffers.

    ``saved``: the types of their devices by their paths. ``tree`` has the names of the buffers that require gradients,
    unless it is that of an older version.
    """
    found = {key.removeprefix(walk.buffers_at) for key in walk.buffers}.union(walk.none)
    for path in found.difference(saved, tree["none"]):
        owner, name = owner_of_buffer(module, path)
        delattr(owner, name)
    transient = set(tree["transient"])
    for path in tree["none"]:
        set_buffer(module, path, None, path in transient)
    for path, device_type in saved.items():
        owner, name = owner_of_buffer(module, path)
        live = getattr(owner, name) if modules.has_buffer(owner, name) else None
        device = live.device if live is not None else home_of(module, device_type)
        buffer = load(live, f"{walk.buffers_at}{path}", device)
        if buffer is not live:
            set_buffer(module, path, buffer, path in transient)
        if "trained" in tree:
            set_requires_grad(buffer, path in tree["trained"])


def owner_of_buffer(module: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    *parts, name = path.split(".")
    owner = without_compiler(module)
    for part in parts:
        owner = without_compiler(getattr(owner, part))  # a ScriptModule has no get_submodule()
    return owner, name


def without_compiler(module: torch.nn.Module) -> torch.nn.Module:
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


def running_statistics(name: str, module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that a forward pass updates from this rank's batch alone.

    DistributedDataParallel broadcasts rank 0's buffers before the pass, so they differ after it. The statistics of
    SyncBatchNorm cover all ranks, so they are not included.
    """
    for path, part in parts_of(module, remove_duplicate=False):
        if isinstance(part, NORMS) and not isinstance(part, torch.nn.SyncBatchNorm):
            for key in ("running_mean", "running_var", "num_batches_tracked"):
                if getattr(part, key, None) is not None:
                    yield f"{name}.buffers.{path}.{key}" if path else f"{name}.buffers.{key}"
