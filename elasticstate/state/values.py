"""Contents of a commit: tensors and arrays as bytes, all other objects as one pickle."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from elasticstate.errors import StateError
from elasticstate.state.layout import Entry, Frame, view

Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
Captured: TypeAlias = Mapping[str, Any]  # name -> tensor | numpy array | picklable object


@dataclass(frozen=True, slots=True)
class Tree:
    """Nested dicts, lists and tuples: the state of one object, with leaves in place of its tensors."""

    tree: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """A list, tuple or dict of objects with ``state_dict()``: each has a value of its own, at these paths."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Placeholder for a tensor or array in a tree. The name of the tensor follows from the place."""

    device_type: str


@dataclass(frozen=True, slots=True)
class Row:
    """Placeholder in a tree for a dict with text keys that contains only tensors on the CPU. Equal rows are one object.

    An optimizer has one for each parameter. A dict of leaves would cost more than the copy of a small tensor.
    """

    kind: type[dict[str, Any]]
    keys: tuple[str, ...]


class Values(Mapping[str, Any]):
    """Content of a commit by name, without attached values. Tensors and arrays are views, created on access.

    ``loaded``: the live tensors and arrays that already contain the commit's bytes (``Snapshot.load_into``). Two of
    them are one tensor exactly if they are one in the commit.
    """

    def __init__(self, memory: torch.Tensor, frame: Frame, objects: Mapping[str, Any], loaded: dict[str, Array]):
        attached = frame.sharding
        self.entries: dict[str, Entry] = {e.name: e for e in frame.layout.entries if e.name not in attached.shards}
        self._memory = memory
        self._tensors = frame.tensors
        self._objects = {name: value for name, value in objects.items() if name not in attached.names}
        self.loaded = loaded

    def __getitem__(self, name: str) -> Any:
        entry = self.entries.get(name)
        return self._objects[name] if entry is None else view(self._memory, entry, self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.entries or name in self._objects

    def __iter__(self) -> Iterator[str]:
        yield from self._objects
        yield from self.entries

    def __len__(self) -> int:
        return len(self._objects) + len(self.entries)

    def is_loaded(self, name: str, target: object) -> bool:
        """Return True if ``target`` already contains the bytes of ``name``."""
        loaded = self.loaded.get(name)
        if loaded is None or loaded is target:
            return loaded is not None
        return (
            isinstance(target, torch.Tensor)
            and isinstance(loaded, torch.Tensor)
            and alike(target, loaded)
            and target.is_contiguous()
            and target.data_ptr() == loaded.data_ptr()
        )


def is_array(value: object) -> bool:
    """Return True for values stored as bytes: torch tensors, and numpy arrays of plain numbers or strings."""
    return isinstance(value, torch.Tensor) or (type(value) is np.ndarray and value.dtype.kind in "biufcSUmM")


def split_by_kind(
    captured: Captured,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Return the tensors, the arrays and the objects."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    objects: dict[str, Any] = {}
    for name, value in captured.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif is_array(value):
            arrays[name] = value
        else:
            objects[name] = value
    return tensors, arrays, objects


def load_value(target: object, values: Captured, name: str, device: torch.device | None = None) -> Array:
    """Call ``write_into`` for a value by its name, unless ``target`` is loaded already."""
    if isinstance(values, Values) and values.is_loaded(name, target):
        return target  # type: ignore[return-value]  # a loaded target is a tensor or array
    return write_into(target, values[name], device)


def is_loaded(target: object, values: Captured, name: str) -> bool:
    """Return True if ``target`` already contains the bytes of ``name``."""
    return isinstance(values, Values) and values.is_loaded(name, target)


def write_into(target: object, value: Array, device: torch.device | None = None) -> Array:
    """Copy ``value`` into ``target`` if that is a tensor or array like it, else make a copy. Return the written object.

    ``device``: where a new tensor is made; None is the device of ``target`` if that is a tensor, otherwise the CPU. A
    tensor whose elements share memory (``expand``) is replaced by a copy, because torch refuses to write into it.
    """
    if not isinstance(value, torch.Tensor):
        if type(target) is np.ndarray and alike(target, value) and target.flags.writeable:
            np.copyto(target, value)
            return target
        return np.array(value)
    if not isinstance(target, torch.Tensor):
        return value.to(device or "cpu", copy=True)
    device = device or target.device
    if alike(target, value) and target.device.type == device.type and not _overlaps_itself(target):
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(value)
        return target
    return value.to(device, copy=True)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements may share an address: a stride does not exceed the extent of all smaller strides."""
    if tensor.is_contiguous():
        return False
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += stride * (size - 1)
    return False


def alike(target: Array, value: Array) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


# ----------------------------------------------------------------------------------------------------------- objects

CANNOT_BE_PICKLED = (TypeError, pickle.PicklingError)
"""Errors of pickle itself, which have no line of the script."""


def dumps(objects: dict[str, Any]) -> bytes:
    """Pickle objects by reference where possible. All workers run the same script, so classes keep their identity.

    Raises StateError that names the value that cannot be pickled.
    """
    try:
        return pickle.dumps(objects, protocol=5)
    except Exception:  # any exception: objects define their own pickling
        return pickle.dumps({name: _made_picklable(name, value) for name, value in objects.items()}, protocol=5)


def _made_picklable(name: str, value: object) -> object:
    """Return the value if it can be pickled; otherwise a cloudpickle box (lambdas, closures, local classes)."""
    with contextlib.suppress(Exception):
        pickle.dumps(value, protocol=5)
        return value
    try:
        if isinstance(value, io.TextIOWrapper):  # cloudpickle would pickle the whole text of a file that is read
            raise TypeError("an open file")
        return _Boxed(cloudpickle.dumps(value, protocol=5))
    except Exception as error:
        raise StateError(
            f"state.{name} cannot be committed, because it contains a value that cannot be pickled "
            f"({type(value).__name__}: {error}). Keep the value outside the state, or give its class __reduce__, or "
            "state_dict() and load_state_dict()."
        ) from (None if isinstance(error, CANNOT_BE_PICKLED) else error)


class _Boxed:
    """A box that unpickles to the value inside."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)
