"""Nested containers of tensors and other values, as state_dict() methods return them."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

import torch

from elasticstate.state.iterable_data import is_stateful
from elasticstate.state.values import Captured, Leaf, Row, is_array, load_value

_leaf = functools.cache(Leaf)  # one for each device type, so that a pickle contains it once
_CPU = torch.device("cpu")
_row = functools.lru_cache(1024)(Row)


def flatten(value: Any, path: str, values: dict[str, Any]) -> Any:
    """Put the tensors and arrays of nested containers into ``values`` under their paths. Return the remaining tree."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        for key, item in value.items():
            if type(key) is not str or not isinstance(item, torch.Tensor) or not item.is_cpu:
                return kind((key, flatten(item, f"{path}.{key}", values)) for key, item in value.items())
        for key, tensor in value.items():
            name = f"{path}.{key}"
            values[name if name not in values else _free(name, values)] = tensor
        return _row(kind, tuple(value))
    if kind is list or kind is tuple:
        return kind(flatten(item, f"{path}.{i}", values) for i, item in enumerate(value))
    if is_array(value):
        values[_free(path, values)] = value
        return _leaf(value.device.type if isinstance(value, torch.Tensor) else "cpu")
    return value


def stateful_parts(path: str, value: object) -> dict[str, Any]:
    """Return the objects with ``state_dict()`` of which nested lists, tuples and dicts consist, by their paths.

    The result is empty if there are other objects, too. Keys that are no text count as positions.
    """
    items: Any = ()
    if type(value) in (list, tuple):
        items = enumerate(value)  # type: ignore[arg-type]
    elif type(value) in (dict, OrderedDict):
        items = ((key if isinstance(key, str) else i, item) for i, (key, item) in enumerate(value.items()))  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for key, item in items:
        at = f"{path}.{key}"
        inside = {at: item} if is_stateful(item) else stateful_parts(at, item)
        if not inside or inside.keys() & found.keys():
            return {}
        found.update(inside)
    return found


def _free(path: str, taken: Container[str]) -> str:
    """Return a free name for the value at ``path``. A path may be taken already: ``{"a.b": x, "a": {"b": y}}``."""
    while path in taken:
        path += "'"
    return path


def _use(path: str, used: set[str]) -> str:
    """Return the free name for the value at ``path``, which is in use from now on."""
    if path in used:
        path = _free(path, used)
    used.add(path)
    return path


def rebuild(tree: Any, values: Captured, live: Any, device: torch.device | None, path: str, used: set[str]) -> Any:
    """Reverse ``flatten``: write tensors into those at the same place in ``live``, or create new ones.

    ``device``: for new tensors that were not on the CPU; None is the present device of their type. ``used``: the names
    met so far, which make the generated names equal to those of ``flatten``.
    """
    return rebuild_with(
        lambda target, name, here: load_value(target, values, name, here), tree, live, device, path, used
    )


def copy_with_same_tensors(value: Any) -> Any:
    """Return a deep copy of nested containers with the same tensors and arrays in it."""
    values: dict[str, Any] = {}
    tree = copy.deepcopy(flatten(value, "", values))
    return rebuild_with(lambda _, name, __: values[name], tree, None, None, "", set())


Load = Callable[[object, str, torch.device], Any]
"""Return the tensor or array of a name, given the live value at its place and the device of a new tensor."""


def rebuild_with(load: Load, tree: Any, live: Any, device: torch.device | None, path: str, used: set[str]) -> Any:
    """Do what ``rebuild`` does, with tensors that ``load`` returns."""
    if isinstance(tree, Leaf):
        here = device if device is not None and device.type == tree.device_type else torch.device(tree.device_type)
        return load(live, _use(path, used), here)
    if isinstance(tree, Row):
        inside = live if isinstance(live, dict) else {}
        here = device if device is not None and device.type == "cpu" else _CPU
        return tree.kind((key, load(inside.get(key), _use(f"{path}.{key}", used), here)) for key in tree.keys)
    if type(tree) in (dict, OrderedDict):
        inside = live if isinstance(live, dict) else {}
        return type(tree)(
            (key, rebuild_with(load, item, inside.get(key), device, f"{path}.{key}", used))
            for key, item in tree.items()
        )
    if type(tree) in (list, tuple):
        beside = live if isinstance(live, list | tuple) and len(live) == len(tree) else [None] * len(tree)
        return type(tree)(
            rebuild_with(load, item, one, device, f"{path}.{i}", used)
            for i, (item, one) in enumerate(zip(tree, beside, strict=True))
        )
    return tree
