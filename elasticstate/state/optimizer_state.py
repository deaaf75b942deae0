"""State of an optimizer with torch's own ``state_dict`` methods, in a commit; parameter groups of all optimizers.

The parameters of each group have the names that they have in the state's modules, so a commit can be loaded by a
process that has other groups. A parameter of no module of the state has no name: its position decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import msgspec
import torch
from torch.optim.lr_scheduler import LRScheduler

from elasticstate._native import Identities
from elasticstate.compat import dtensors
from elasticstate.errors import StateError
from elasticstate.state.module_state import OR_HOOK, parameters_of, registries_of
from elasticstate.state.values import Captured, Leaf, flatten, rebuild

GroupNames = list[list[str | None]]
"""Names of the parameters of each group; None for a parameter without a name."""


def capture_optimizer(name: str, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> dict[str, Any]:
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


class NamedGroups:
    """The names of the parameters of all optimizers' groups. Searched for again only when something has changed: that
    would take a while for each commit of many small parameters. It keeps the last values alive."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}
        self._values: list[Any] = []
        self._identities: Identities | None = None

    def find(
        self, optimizers: Mapping[str, torch.optim.Optimizer], owners: Mapping[str, torch.nn.Module | torch.Tensor]
    ) -> dict[str, bytes]:
        """Return the names by the optimizers' names, as msgpack of ``GroupNames``: so a commit only copies them.

        ``owners``: the modules of the state, and its tensors.
        """
        values: list[Any] = [*optimizers, *optimizers.values(), *owners, *owners.values()]
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        if self._identities is None or not is_same or not self._identities.unchanged():
            names = {id(tensor): name for name, tensor in named_tensors(owners).items()}
            self._found = {
                name: msgspec.msgpack.encode([[names.get(id(p)) for p in g["params"]] for g in optimizer.param_groups])
                for name, optimizer in optimizers.items()
            }
            self._values, self._identities = values, _identities(optimizers.values(), owners.values())
        return self._found


def named_tensors(owners: Mapping[str, torch.nn.Module | torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of the modules, and the tensors, by their names in a commit."""
    found: dict[str, torch.Tensor] = {}
    for name, owner in owners.items():
        found.update(parameters_of(name, owner) if isinstance(owner, torch.nn.Module) else {name: owner})
    return found


def _identities(
    optimizers: Iterable[torch.optim.Optimizer], owners: Iterable[torch.nn.Module | torch.Tensor]
) -> Identities | None:
    """Return what shows a change of the names; None if a change cannot be seen."""
    containers: list[Any] = []
    for optimizer in optimizers:
        containers += [optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)]
    for owner in owners:
        registries = registries_of(owner) if isinstance(owner, torch.nn.Module) else []
        if registries is None:
            return None
        containers += registries
    are_plain = all(type(container) in (dict, list) for container in containers)
    return Identities(containers) if are_plain else None


def decode_names(names: bytes) -> GroupNames:
    """Return what ``NamedGroups.find`` has encoded."""
    return msgspec.msgpack.decode(names, type=GroupNames)


def is_plain_optimizer(value: object) -> bool:
    """Return True for an optimizer with torch's own state_dict methods. Others may keep their state elsewhere."""
    kind = type(value)
    return (
        isinstance(value, torch.optim.Optimizer)
        and kind.state_dict is torch.optim.Optimizer.state_dict  # type: ignore[attr-defined]
        and kind.load_state_dict is torch.optim.Optimizer.load_state_dict  # type: ignore[attr-defined]
    )


def owned_by(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yield the ids of the tensors that only ``step`` writes: parameters that are trained, and their state."""
    for group in optimizer.param_groups:
        yield from (id(p) for p in group["params"] if p.requires_grad)
    for entry in optimizer.state.values():
        yield from map(id, entry.values() if isinstance(entry, dict) else ())


def load_optimizer(
    name: str, optimizer: torch.optim.Optimizer, tree: Any, values: Captured, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Write into existing tensors, create missing ones, and remove those that the commit does not have.

    ``load_state_dict`` is not used: it keeps the tensors that it gets, and casts them to the parameter's dtype.

    ``parameters``: the parameters of the state's modules, by name.
    """
    saved_groups = tree["param_groups"]
    check_settings(f"state.{name}", optimizer, saved_groups)
    names: GroupNames = [[None] * group["params"] for group in saved_groups]  # as in a commit of an older version
    if "names" in tree:
        names = decode_names(tree["names"])
    arrange_groups(f"state.{name}", optimizer, names, parameters, saved_groups)
    used: set[str] = set()
    for i, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        others = {key: value for key, value in saved_group.items() if key != "params"}
        rebuilt = rebuild(others, values, group, None, f"{name}.param_groups.{i}", used)
        rebuilt["params"] = group["params"]
        group.clear()
        group.update(rebuilt)
    positions = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for position, entry in tree["state"].items():
        key = positions[position] if isinstance(position, int) else position
        device = key.device if isinstance(key, torch.Tensor) else None
        state[key] = rebuild(entry, values, optimizer.state.get(key), device, f"{name}.state.{position}", used)
    optimizer.state.clear()
    optimizer.state.update(state)


def arrange_groups(
    name: str,
    optimizer: torch.optim.Optimizer,
    names: GroupNames,
    parameters: Mapping[str, torch.Tensor],
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """Give the optimizer groups of the named parameters, in this order. Groups that it lacks are added.

    ``name``: that of the optimizer, for errors. ``settings``: of each group. They are loaded afterwards; here a new
    group gets those that are no tensors. Raises StateError if a parameter is not found.
    """
    groups = optimizer.param_groups
    wanted = _find_parameters(name, groups, names, parameters)
    if [list(map(id, group["params"])) for group in groups] == [list(map(id, found)) for found in wanted]:
        return
    del groups[len(wanted) :]  # added after the commit
    for group, found in zip(groups, wanted, strict=False):
        group["params"][:] = found  # the optimizer may refer to the list, as LBFGS does
    for setting, found in list(zip(settings, wanted, strict=True))[len(groups) :]:
        plain = {key: value for key, value in setting.items() if key != "params" and not _has_leaf(value)}
        named = plain.pop("param_names", None)
        optimizer.add_param_group({**plain, "params": list(zip(named, found, strict=True)) if named else found})


def _find_parameters(
    name: str, groups: list[dict[str, Any]], names: GroupNames, parameters: Mapping[str, torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Return the parameters of each group. A parameter without a name is the live one at the same place."""
    taken = {id(parameters[key]) for group in names for key in group if key is not None and key in parameters}
    found: list[list[torch.Tensor]] = []
    for i, group in enumerate(names):
        beside = groups[i]["params"] if i < len(groups) else ()
        found.append([])
        for j, key in enumerate(group):
            parameter = parameters.get(key) if key is not None else None
            if parameter is None and j < len(beside) and id(beside[j]) not in taken:
                parameter = beside[j]
            if parameter is None:
                sizes = [len(each["params"]) for each in groups], [len(each) for each in names]
                what = f"{key}, which the state does not have" if key else f"parameter {j}, which is in no module of it"
                raise StateError(
                    f"{name} has parameter groups of {sizes[0]} parameters, and the commit has groups of "
                    f"{sizes[1]}: group {i} trains {what}. Put all modules that the optimizer trains into the state, "
                    f"or add the same groups before the first call of the function that is decorated with run{OR_HOOK}."
                )
            found[-1].append(parameter)
        if group and not any(group) and len(beside) > len(group):  # unnamed ones cannot be told from each other
            raise StateError(
                f"{name} has parameter groups of {[len(each['params']) for each in groups]} parameters, and the "
                f"commit has groups of {[len(each) for each in names]}. Construct the same groups as the worker that "
                f"committed{OR_HOOK}."
            )
    return found


def check_settings(name: str, optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise StateError if the commit is that of an optimizer of another class: it lacks what this one's step uses."""
    groups = optimizer.param_groups
    used = [key for key in optimizer.defaults if all(key in group for group in groups)]
    if lacking := [key for key in used if any(key not in setting for setting in settings)]:
        raise StateError(
            f"{name} is a {type(optimizer).__name__}, and the commit is that of another optimizer: it has no "
            f"{', '.join(lacking[:3])}. Construct the same optimizer as the worker that committed{OR_HOOK}."
        )


def check_scheduler(name: str, scheduler: object, tree: Any) -> None:
    """Raise StateError if a scheduler has fewer functions than the commit: ``state_dict`` does not contain them."""
    live = getattr(scheduler, "lr_lambdas", None)
    saved = tree.get("lr_lambdas") if isinstance(scheduler, LRScheduler) and isinstance(tree, dict) else None
    if isinstance(live, list) and isinstance(saved, list) and len(live) != len(saved):
        raise StateError(
            f"state.{name} has functions for {len(live)} parameter groups, and the commit for {len(saved)}. Construct "
            f"the same scheduler as the worker that committed{OR_HOOK}."
        )


def _has_leaf(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_leaf, value))
    return isinstance(value, Leaf)


# Tensors of an optimizer of torch.optim that are as large as the parameter, by the name of its class.
_TENSORS: dict[str, Callable[[dict[str, Any]], int]] = {
    "ASGD": lambda _: 1,
    "Adadelta": lambda _: 2,
    "Adafactor": lambda _: 0,  # one row and one column of each parameter
    "Adam": lambda group: 3 if group.get("amsgrad") else 2,
    "AdamW": lambda group: 3 if group.get("amsgrad") else 2,
    "Adamax": lambda _: 2,
    "LBFGS": lambda group: 2 * int(group.get("history_size", 0)) + 2,
    "Muon": lambda _: 1,
    "NAdam": lambda _: 2,
    "RAdam": lambda _: 2,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": lambda _: 2,
    "SGD": lambda group: int(bool(group.get("momentum"))),
    "SparseAdam": lambda _: 2,
}


def bytes_to_come(values: Iterable[object]) -> int | None:
    """Return the bytes that the first steps of optimizers among the values will add to a commit; None: not known."""
    total = 0
    for value in values:
        if not isinstance(value, torch.optim.Optimizer) or value.state:  # that has made its first step
            continue
        names = (kind.__name__ for kind in type(value).__mro__ if f"{kind.__module__}.".startswith("torch.optim."))
        tensors = next((_TENSORS[name] for name in names if name in _TENSORS), None)
        if tensors is None:
            return None
        total += sum(tensors(group) * sum(map(_bytes_of, group["params"])) for group in value.param_groups)
    return total


def _bytes_of(parameter: Any) -> int:
    local: torch.Tensor = dtensors.local_of(parameter) if dtensors.is_dtensor(parameter) else parameter
    return local.nbytes if parameter.requires_grad else 0
