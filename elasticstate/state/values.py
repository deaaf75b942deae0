"""What goes into a commit and comes out of it: tensors and arrays as bytes, all else as one pickle."""

from __future__ import annotations

import contextlib
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
    """Nested dicts, lists and tuples: the state of one object, with leaves for its tensors."""

    tree: Any


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands in a tree where a tensor or array was. Its name follows from its place."""

    device_type: str


@dataclass(frozen=True, slots=True)
class Row:
    """Stands in a tree where a dict was that had text for keys, and nothing but tensors on the CPU. Equal ones are one.

    An optimizer has one for each parameter: a dict of leaves would cost more than the copy of a small tensor.
    """

    kind: type[dict[str, Any]]
    keys: tuple[str, ...]


class Values(Mapping[str, Any]):
    """The content of a commit by name. Tensors and arrays are views of its buffer, made when they are asked for.

    ``written``: the live tensors and arrays that have been given the commit's bytes already.
    """

    def __init__(self, memory: torch.Tensor, frame: Frame, objects: Mapping[str, Any], written: dict[str, Array]):
        self.entries: dict[str, Entry] = {entry.name: entry for entry in frame.layout.entries}
        self._memory = memory
        self._tensors = frame.tensors
        self._objects = objects
        self._written = written

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

    def is_in(self, name: str, target: object) -> bool:
        """Whether ``target`` has been given the bytes of ``name`` already."""
        written = self._written.get(name)
        if written is None or written is target:
            return written is not None
        return (
            isinstance(target, torch.Tensor)
            and isinstance(written, torch.Tensor)
            and alike(target, written)
            and target.is_contiguous()
            and target.data_ptr() == written.data_ptr()
        )


def is_array(value: object) -> bool:
    """Whether a value travels as tensor bytes: a torch tensor, or a numpy array of plain numbers or strings."""
    return isinstance(value, torch.Tensor) or (type(value) is np.ndarray and value.dtype.kind in "biufcSUmM")


def put(target: object, values: Captured, name: str, device: torch.device | None = None) -> Array:
    """``write_into`` of a value by its name; does nothing where a restore has written it already."""
    if isinstance(values, Values) and values.is_in(name, target):
        return target  # type: ignore[return-value]  # it is a tensor or array
    return write_into(target, values[name], device)


def write_into(target: object, value: Array, device: torch.device | None = None) -> Array:
    """Copy ``value`` into ``target`` if that is a like tensor or array; otherwise make an own copy. Returns which.

    ``device`` is where a tensor is made; None: where ``target`` is if that is a tensor, else the CPU.
    """
    if not isinstance(value, torch.Tensor):
        if type(target) is np.ndarray and alike(target, value) and target.flags.writeable:
            np.copyto(target, value)
            return target
        return np.array(value)
    if not isinstance(target, torch.Tensor):
        return value.to(device or "cpu", copy=True)
    device = device or target.device
    if alike(target, value) and target.device.type == device.type:
        with torch.no_grad():
            target.copy_(value)
        return target
    return value.to(device, copy=True)


def alike(target: Array, value: Array) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


# ----------------------------------------------------------------------------------------------------------- objects


def dumps(objects: dict[str, Any]) -> bytes:
    """Pickle by reference where that works: all workers run one script, and its classes stay themselves everywhere.

    Raises StateError that names what cannot be pickled.
    """
    try:
        return pickle.dumps(objects, protocol=5)
    except Exception:  # objects raise what they like
        return pickle.dumps({name: _made_picklable(name, value) for name, value in objects.items()}, protocol=5)


def _made_picklable(name: str, value: object) -> object:
    """The value itself if it can be pickled; otherwise boxed by cloudpickle: lambdas, closures, local classes."""
    with contextlib.suppress(Exception):
        pickle.dumps(value, protocol=5)
        return value
    try:
        return _Boxed(cloudpickle.dumps(value, protocol=5))
    except Exception as error:
        raise StateError(
            f"state.{name} holds something that cannot be committed ({type(value).__name__}: {error}); "
            "keep it outside the state, or give its class __reduce__ or state_dict()/load_state_dict()"
        ) from error


class _Boxed:
    """Unpickles to the value that was boxed."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)
