"""TorchState: modules, optimizers, and all other objects that a training job changes."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_not
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elasticstate.compat import modules
from elasticstate.compat.modules import load_state, state_of
from elasticstate.errors import StateError, UsageError
from elasticstate.state.async_commit import is_captured, watch_steps
from elasticstate.state.attached import require_describable
from elasticstate.state.base import State
from elasticstate.state.divergence import Kinds
from elasticstate.state.loader import fault_of, has_iterators, is_stateful, require_own_position
from elasticstate.state.module_state import (
    OR_HOOK,
    capture_module,
    flag_of,
    load_bare,
    load_module,
    require_same_ties,
    requires_grad,
    running_statistics,
    without_compiler,
)
from elasticstate.state.optimizer_state import (
    NamedGroups,
    arrange_groups,
    bytes_to_come,
    capture_optimizer,
    check_scheduler,
    decode_names,
    is_plain_optimizer,
    load_optimizer,
    named_tensors,
    owned_by,
    plain_groups,
)
from elasticstate.state.tick_record import QuickCapture
from elasticstate.state.values import (
    Captured,
    Parts,
    Tree,
    copy_with_same_tensors,
    flatten,
    is_array,
    rebuild,
    require_no_world,
    stateful_parts,
    without_history,
)


class TorchState(State):
    """A state of the objects that PyTorch training consists of.

    * A module, without its DistributedDataParallel wrapper: parameters, all buffers (persistent or not), extra state,
      ``training`` of each module in it and ``requires_grad`` of each parameter.
    * An optimizer: state and parameter groups, with learning rates. A new worker builds the optimizer's state from the
      root's, without a step, and groups that it lacks, if modules of the state have their parameters.
    * Any other object with ``state_dict()`` and ``load_state_dict()``: a scheduler, GradScaler, sampler, data loader.
    * Tensors (with ``requires_grad``) and numpy arrays, and any object that can be pickled.

    ``restore()`` and ``sync()`` write in place. They never replace a parameter, a buffer, or a tensor of an optimizer
    that has the right shape.

    The constructor warns if there are no values, and about a StatefulDataLoader that cannot resume correctly.

    Raises UsageError if a name cannot be the name of a value, or a value is a loader without ``state_dict()``.
    """

    def __init__(self, **values: Any) -> None:
        self._named_groups = NamedGroups()
        super().__init__(**values)
        callers_line = 2 if type(self).__init__ is TorchState.__init__ else 3
        if not values and type(self).capture is TorchState.capture:
            warnings.warn(
                "TorchState() has no values: a commit keeps nothing, and a restarted worker begins from scratch. Pass "
                "all that the training changes: TorchState(model=model, optimizer=optimizer).",
                stacklevel=callers_line,
            )
        for name, value in self._parts().items():
            if fault := fault_of(value):
                warnings.warn(f"state.{name}: {fault}", stacklevel=callers_line)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            watch_steps()  # before a step is captured for a graph

    def attach(self, *, init: Callable[[], object] | None = None, **values: Any) -> None:
        """Attach values that belong to this world, such as a sharded model. All ranks call it, once in each world.

        ``commit`` then saves this worker's parts of their tensors, without any collective. The next world makes new
        values and attaches them: their content comes from the commits, resharded, and no whole tensor is made::

            with torch.device("meta"):
                model = GPT(config)
            fully_shard(model, mesh=init_device_mesh(elastic.device().type, (elastic.size(),)))
            model.to_empty(device=elastic.device())
            optimizer = torch.optim.AdamW(model.parameters())
            state.attach(model=model, optimizer=optimizer, init=model.init_weights)

        A tensor of a module or optimizer may be a DTensor with placements ``Shard`` and ``Replicate`` on a mesh of any
        shape: FSDP2, HSDP, tensor parallelism, or both. The shape of the mesh may change between worlds; the shape and
        dtype of the whole tensor must not. Parts may be of different sizes, or empty. All other tensors and values are
        the same on all ranks. The state of an optimizer is created with the placements of its parameters.

        The values are no attributes of the state: keep them in variables of the function. ``restore()`` raises
        UsageError while values are attached.

        Args:
            init: called in the first world of a job, to give the tensors their first values. Afterwards, replicas are
                made equal.
            **values: modules, torch's own optimizers, and objects with ``state_dict()`` and ``load_state_dict()``.

        Raises:
            UsageError: the call is outside a ``run`` function, after a tick, or the second one in this world; there is
                no value or no ``init`` in the first world; a name is that of a value of this state; or a value has no
                ``state_dict()``.
            StateError: a tensor is on the meta device, or has a placement such as ``Partial``; an optimizer trains a
                parameter of no attached module; the ranks attach different names; or the values do not fit the commit.
            CollectiveError: parts cannot be read. ``run`` makes the next world.
        """
        if not values:
            raise UsageError("attach() has no values. Pass what belongs to this world: attach(model=model, init=…).")
        for name in values:
            if name in self._names:
                raise UsageError(f"attach({name}=…): the state has a value of this name. Choose another name.")
        if self._committer.attach(values, init):
            type(self).check(self)

    def _check_value(self, name: str, value: object) -> None:
        if type(self).capture is TorchState.capture:
            require_own_position(name, value)
            require_no_world(name, value)
            for path, part in (stateful_parts(name, value) or {name: value}).items():
                require_describable(f"state.{path}", part)

    def _leave_world(self) -> None:
        """Replace each DistributedDataParallel by its module: the wrapper belongs to the world that ends."""
        for name in self._names:
            value = getattr(self, name)
            if (bare := _without_wrappers(value)) is not value:
                setattr(self, name, bare)

    def capture(self) -> dict[str, Any]:
        return self._captured(self._parts())

    def _parts(self) -> dict[str, Any]:
        """Return the values by name; instead of a list, tuple or dict of objects with ``state_dict()``, these objects
        by their paths. They keep their identity at a restore, as the script may have other references to them."""
        found: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            found.update(stateful_parts(name, value) or {name: value})
        return found

    def _pickled(self) -> dict[str, Any]:
        if type(self).capture is not TorchState.capture:
            return {}
        return {name: value for name, value in self._parts().items() if not (is_array(value) or is_stateful(value))}

    def _captured(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        loaded = self._committer.loaded or {}
        optimizers: dict[str, torch.optim.Optimizer] = {}
        values.update((name, Parts(paths)) for name, paths in _paths(parts).items())
        for name, value in parts.items():
            if name in loaded:  # state_dict() may return the position of an older iterator
                values[name] = Tree(flatten(loaded[name], name, values))
            elif is_array(value):
                values[name] = value
                if isinstance(value, torch.Tensor):
                    values[flag_of(name)] = requires_grad(value)
            elif is_stateful(value):
                values[name] = Tree(_capture(name, value, values))
                if isinstance(value, torch.optim.Optimizer):
                    optimizers[name] = value
            else:
                values[name] = value
        for name, found in self._named_groups.find(optimizers, self._owners()).items() if optimizers else ():
            if is_plain_optimizer(optimizers[name]):
                values[name].tree["names"] = found
            else:
                values[f"{name}.groups"] = found, plain_groups(optimizers[name])
        pickled = {name: parts[name] for name in parts if values[name] is parts[name] and not is_array(parts[name])}
        values.update(self._recorded(pickled).moved(pickled))
        return values

    def apply(self, values: Captured) -> None:
        self._check_names(values, TorchState.capture)
        parameters = named_tensors(self._owners())
        require_same_ties(parameters, values)
        parts = self._parts()
        here = _paths(parts)
        there = {name: saved.paths for name in self._names if isinstance(saved := values[name], Parts)}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                objects = [", ".join(of.get(name, ())) or "no objects with state_dict()" for of in (here, there)]
                raise StateError(
                    f"state.{name} consists of {objects[0]}, in the commit of {objects[1]}. Construct the state with "
                    f"the same objects as the worker that committed{OR_HOOK}."
                )
        for name, live in parts.items():
            saved = values[name]
            if isinstance(saved, Tree):
                if not is_stateful(live):
                    raise StateError(
                        f"state.{name} is a {type(live).__name__}, which has no load_state_dict(). Construct the state "
                        f"with the same objects as the worker that committed."
                    )
                self._load(name, live, saved.tree, values, parameters)
            elif is_array(saved):
                setattr(self, name, value := load_bare(name, live, values))
                if name in parameters:
                    parameters[name] = value
        self._restore_pickled(values)

    def _load(self, name: str, live: Any, tree: Any, values: Captured, parameters: Mapping[str, torch.Tensor]) -> None:
        if isinstance(live, torch.nn.Module):
            module = _unwrap(live)
            load_module(name, module, tree, values)
            live.training = module.training
        elif is_plain_optimizer(live):
            load_optimizer(name, live, tree, values, parameters)
        else:
            if isinstance(live, torch.optim.Optimizer) and f"{name}.groups" in values:
                names, settings = values[f"{name}.groups"]
                arrange_groups(f"state.{name}", live, decode_names(names), parameters, settings)
            check_scheduler(name, live, tree)
            # rebuild writes into the tensors of state_dict(). If these are the live tensors, that restores them. If
            # these are copies, no other object uses them. load_state_dict() may keep tensors, so it gets no views of
            # the commit, and may copy them deeply, which torch refuses for a result of autograd.
            is_iterated = has_iterators(live)
            state = rebuild(
                tree, values, None if is_iterated else without_history(live.state_dict()), None, name, set()
            )
            if is_iterated and self._committer.loaded is not None:
                self._committer.loaded[name] = copy_with_same_tensors(state)
            load_state(live, state)

    def _owners(self) -> dict[str, torch.nn.Module | torch.Tensor]:
        """Return the values that optimizers may train: modules and tensors."""
        return {
            name: _unwrap(value) if isinstance(value, torch.nn.Module) else value
            for name, value in self._parts().items()
            if isinstance(value, torch.nn.Module | torch.Tensor)
        }

    def _load_targets(self) -> Captured:
        """Leave out objects with iterators: ``state_dict()`` may begin to read, here perhaps before the first world."""
        if type(self).capture is not TorchState.capture:
            return self.capture()
        return self._captured({name: value for name, value in self._parts().items() if not has_iterators(value)})

    def _value_kinds(self) -> Kinds:
        return {name: is_stateful(value) for name, value in self._parts().items()}

    def _optimizer_owned(self) -> set[int]:
        """Return the ids of the parameters that the optimizers train, and of the tensors in the optimizers' state."""
        found: set[int] = set()
        for value in self._parts().values():
            if is_plain_optimizer(value) and not is_captured(value):
                found.update(owned_by(value))
        return found

    def _bytes_to_come(self) -> int | None:
        return bytes_to_come(self._parts().values())

    def _quick_capture(self, captured: Captured) -> QuickCapture | None:
        if type(self).capture is not TorchState.capture or any(isinstance(v, Parts) for v in captured.values()):
            return None
        return QuickCapture.make(self.__dict__, self._names, captured)

    def _owned(self) -> set[int]:
        """Return the ids of all parameters, and of all tensors in the state of optimizers."""
        found: set[int] = set()
        for value in self._parts().values():
            found.update(map(id, _parameters(value)))
            if is_plain_optimizer(value):
                tensors: dict[str, Any] = {}
                flatten(dict(enumerate(value.state.values())), "", tensors)
                found.update(map(id, tensors.values()))
        return found

    def _replicates(self) -> Callable[[str], bool]:
        """Modules, except running statistics, torch's optimizers, and tensors that are trained. A plain tensor may be
        this rank's own."""
        beginnings: list[str] = []
        left_out: set[str] = set()
        trained: set[str] = set()
        for name, value in self._parts().items():
            if isinstance(value, torch.nn.Module):
                left_out.update(running_statistics(name, _unwrap(value)))
            if isinstance(value, torch.nn.Module) or is_plain_optimizer(value):
                beginnings.append(f"{name}.")
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                trained.add(name)
        whole = tuple(beginnings)
        return lambda name: name in trained or (name.startswith(whole) and name not in left_out)

    def _step_sources(self) -> Mapping[str, object] | None:
        if type(self).capture is not TorchState.capture:
            return None
        attached = self._committer.attached
        return {**self._parts(), **(attached.values if attached else {})}

    def check(self) -> None:
        for name, value in self._parts().items():
            if isinstance(value, torch.nn.Module):
                self.exclude_from_check(*running_statistics(name, _unwrap(value)))
        super().check()

    def _drop_gradients(self) -> None:
        for value in self._parts().values():
            if isinstance(value, torch.amp.GradScaler):
                modules.forget_unscaled(value)
            for parameter in _parameters(value):
                parameter.grad = None


def _paths(parts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the paths in each value that consists of several objects."""
    found: dict[str, tuple[str, ...]] = {}
    for path in parts:
        name, dot, _ = path.partition(".")
        if dot:
            found[name] = (*found.get(name, ()), path)
    return found


def _parameters(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]


def _capture(name: str, value: Any, values: dict[str, Any]) -> Any:
    """Put the tensors of an object into ``values``, and return the rest of its state."""
    if isinstance(value, torch.nn.Module):
        return capture_module(name, _unwrap(value), values)
    if is_plain_optimizer(value):
        return capture_optimizer(name, value, values)
    return flatten(state_of(value), name, values)


def _without_wrappers(value: Any) -> Any:
    """Return a module without DistributedDataParallel, or a container of such. Lists and dicts are changed in place."""
    if isinstance(value, torch.nn.Module):
        return _unwrap(value)
    if type(value) is list:
        value[:] = map(_without_wrappers, value)
    elif type(value) in (dict, OrderedDict):
        value.update({key: _without_wrappers(part) for key, part in value.items()})
    elif type(value) is tuple:
        bare = tuple(map(_without_wrappers, value))
        return bare if any(map(is_not, bare, value)) else value
    return value


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that DistributedDataParallel has wrapped, also if that was compiled; or else the module."""
    inner = without_compiler(module)
    return _unwrap(inner.module) if isinstance(inner, DistributedDataParallel) else module
