"""Search for objects to which a value refers, through containers, attributes and variables of functions."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

_MAX_OBJECTS = 200_000  # that a search looks at
_ATOMS = (str, int, float, complex, type, ModuleType, BuiltinFunctionType)
_LEAVES = (torch.Tensor, np.ndarray, bytes, bytearray, DataLoader, Dataset, Sampler, LRScheduler)


def search(root: object, stops: tuple[type, ...] = ()) -> tuple[list[object], bool]:
    """Return all objects that ``root`` refers to, itself included, and False if there are too many.

    ``stops``: classes of objects whose references are not followed.
    """
    found: list[object] = []
    seen = {id(root)}
    pending = deque([root])
    while pending and len(found) < _MAX_OBJECTS:
        value = pending.popleft()
        found.append(value)
        for child in _children(value) if not isinstance(value, stops) else ():
            if not isinstance(child, _ATOMS) and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return found, not pending


def _children(value: Any) -> list[Any]:
    if value is None or isinstance(value, _LEAVES) or hasattr(type(value), "_is_not_searched"):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
    slots = [getattr(value, name, 0) for name in getattr(type(value), "__slots__", ()) if name != "__dict__"]
    return [*vars(value).values(), *slots, *_globals_of(value)] if hasattr(value, "__dict__") else slots


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _globals_of(value: object) -> list[Any]:
    """Return the global variables, and those of enclosing functions, that the object's ``state_dict`` reads."""
    function = getattr(type(value), "state_dict", None)
    if not isinstance(function, FunctionType) or isinstance(value, torch.nn.Module | Optimizer):
        return []
    names = function.__code__.co_names
    return [function, *(function.__globals__[name] for name in names if name in function.__globals__)]


Contained = list[tuple[str, "weakref.ref[torch.nn.Module | Optimizer]"]]
"""Modules and optimizers in values, each with the name of the value."""


def contained_in(values: Mapping[str, object]) -> Contained:
    """Return the modules and optimizers to which these values refer."""
    kinds = torch.nn.Module, Optimizer
    found: Contained = []
    for name, value in values.items():
        if not isinstance(value, _ATOMS):
            with suppress(Exception):  # of the script's objects
                found += [(name, weakref.ref(part)) for part in search(value, kinds)[0] if isinstance(part, kinds)]
    return found
