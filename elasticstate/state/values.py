"""Contents of a commit: tensors and arrays as bytes, all other objects as one pickle."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from elasticstate._native import checksum
from elasticstate.errors import StateError, UsageError
from elasticstate.state.layout import Entry, Frame, view
from elasticstate.state.loader import is_stateful

Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
Captured: TypeAlias = Mapping[str, Any]  # name -> tensor | numpy array | picklable object
Tensor = torch.Tensor  # a commit asks for it once for each of its values


@dataclass(frozen=True, slots=True)
class Tree:
    """Nested dicts, lists and tuples: the state of one object, with leaves in place of its tensors."""

    tree: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """A list, tuple or dict of objects with ``state_dict()``: each has a value of its own, at these paths."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Paths at which a value has other objects than at the first capture. See in_place.py."""

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
        self._layout, self._has_shards = frame.layout, bool(attached.shards)

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

    @functools.cached_property
    def ties(self) -> dict[object, tuple[str, Array] | None]:
        """The first name of each group that is one tensor in the commit, and the value that was loaded for it."""
        entries = [entry for entry in self.entries.values() if entry.size_bytes]
        if sum(entry.size_bytes for entry in entries) <= self._layout.size_bytes and not self._has_shards:
            return {}  # nearly always
        found = Counter(map(_tie, entries))
        return {tie: None for tie, number in found.items() if number > 1}


def _tie(entry: Entry) -> object:
    return entry.offset, entry.dtype, entry.shape, entry.strides


def is_array(value: object) -> bool:
    """Return True for values stored as bytes: torch tensors, and numpy arrays of plain numbers or strings."""
    return isinstance(value, torch.Tensor) or (type(value) is np.ndarray and value.dtype.kind in "biufcSUmM")


def belongs_to_a_world(value: object) -> bool:
    """Return True for the state of a communication hook, or an averager, of torch: it has a process group, and counts
    steps. By this count, all ranks choose the next collective."""
    return type(value).__module__.startswith("torch.distributed.algorithms.")


_MOST_PARTS = 100  # of a container that are looked at

ANEW = "Create it in the function that is decorated with run, anew in each world."


def require_no_world(name: str, value: object) -> None:
    """Raise UsageError for a value, or a part of a list, tuple or dict, that could not be loaded without a process
    group."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for found in (value, *itertools.islice(parts, _MOST_PARTS)):
        if belongs_to_a_world(found):
            where = f"state.{name} {'is' if found is value else 'contains'} a {type(found).__name__}"
            raise UsageError(f"{where}, which belongs to one world. {ANEW}")


def split_by_kind(
    captured: Captured,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Return the tensors, the arrays and the objects."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    objects: dict[str, Any] = {}
    for name, value in captured.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif is_array(value):
            arrays[name] = value
        else:
            objects[name] = value
    return tensors, arrays, objects


def flat_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in C order, as ``uint8[n]`` on its device."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.reshape(-1).view(torch.uint8)


def checksum_of(value: torch.Tensor) -> int:
    """Return the CRC-32C of the bytes of a dense tensor in C order."""
    content = flat_bytes(value.cpu())
    return checksum(content, 0, len(content))


def load_value(target: object, values: Captured, name: str, device: torch.device | None = None) -> Array:
    """Call ``write_into`` for a value by its name, unless ``target`` is loaded already.

    A new value that is tied in the commit to one that was loaded before shares its memory.
    """
    if not isinstance(values, Values):
        return write_into(target, values[name], device)
    if not values.ties:
        if values.is_loaded(name, target):
            return target  # type: ignore[return-value]  # a loaded target is a tensor or array
        entry = values.entries.get(name)
        return write_into(target, values[name], device, entry.strides if entry is not None else ())
    entry = values.entries[name]
    tie = _tie(entry)
    owner, tied = values.ties.get(tie) or (name, None)
    written: Any = target
    if not values.is_loaded(name, target):
        value = values[name]
        is_near = not isinstance(tied, torch.Tensor) or tied.device.type == _home(target, device).type
        if owner != name and not fits(target, value, device) and is_near:
            written = tied.detach() if isinstance(tied, torch.nn.Parameter) else tied
        else:
            written = write_into(target, value, device, entry.strides)
    if tie in values.ties and owner == name:  # also if all is loaded once more, as for another state
        values.ties[tie] = name, written
    return written  # type: ignore[no-any-return]


def is_loaded(target: object, values: Captured, name: str) -> bool:
    """Return True if ``target`` already contains the bytes of ``name``."""
    return isinstance(values, Values) and values.is_loaded(name, target)


def write_into(
    target: object, value: Array, device: torch.device | None = None, strides: tuple[int, ...] = ()
) -> Array:
    """Copy ``value`` into ``target`` if that is a tensor or array like it, else make a copy. Return the written object.

    ``device``: where a new tensor is made; None is the device of ``target`` if that is a tensor, otherwise the CPU. A
    tensor whose elements share memory (``expand``) is replaced by a copy, because torch refuses to write into it.
    ``strides``: of a new tensor, if they are others than the value's. The fused optimizers of torch take for granted
    that the strides of a parameter are those of its state, and most do not check it.
    """
    if not fits(target, value, device):
        if not isinstance(value, torch.Tensor):
            return np.array(value) if not strides else _like_strides(value, strides)
        home = _home(target, device)
        if not strides:
            return value.to(home, copy=True)
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=home).copy_(value)
    if isinstance(target, torch.Tensor):
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(value)  # type: ignore[arg-type]  # alike
    else:
        np.copyto(target, value)  # type: ignore[arg-type]
    return target  # type: ignore[return-value]


def fits(target: object, value: Array, device: torch.device | None) -> bool:
    """Return True if ``write_into`` can write the value into ``target``."""
    if not isinstance(value, torch.Tensor):
        return type(target) is np.ndarray and alike(target, value) and bool(target.flags.writeable)
    if not isinstance(target, torch.Tensor) or not alike(target, value) or _overlaps_itself(target):
        return False
    return device is None or target.device.type == device.type


def _home(target: object, device: torch.device | None) -> torch.device:
    """Return where a new tensor for ``target`` is made."""
    return device or (target.device if isinstance(target, torch.Tensor) else _CPU)


def _like_strides(value: np.ndarray[Any, Any], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a copy in another order in memory, in which numpy would add up its elements, too."""
    order = sorted(range(value.ndim), key=lambda d: -strides[d])
    copied: np.ndarray[Any, Any] = np.array(value.transpose(order), order="C").transpose(np.argsort(order))
    return copied


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


_CPU = torch.device("cpu")
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


def canonical(value: object) -> bytes | None:
    """Pickle a value so that the bytes depend on the value alone, not on which parts are the same object, nor on the
    order of dicts, which torch's optimizers change in a restore.

    None: it cannot be pickled by reference, like lambdas and similar objects.
    """
    for fast in (True, False):  # the fast mode cannot pickle objects that contain themselves
        with contextlib.suppress(Exception):
            target = io.BytesIO()
            pickler = _Pickler(target, protocol=5)
            pickler.fast = fast
            pickler.dump(value)
            return target.getvalue()
    return None


def comparable_bytes(value: object) -> bytes:
    found = canonical(value)
    return type(value).__qualname__.encode() if found is None else found  # objects that cannot be compared


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        """Sort sets, which have no order of their own, and dicts, except those that may contain themselves.

        torch pickles a tensor in other bytes each time, so its content is taken.
        """
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
            return "tensor", str(value.dtype), tuple(value.shape), flat_bytes(value.cpu()).numpy().tobytes()
        if type(value) is dict and self.fast:
            items = [(canonical(key), canonical(item)) for key, item in value.items()]
            if any(part is None for item in items for part in item):
                raise pickle.PicklingError("the dict contains an object that cannot be compared")
            return "dict", sorted(items)
        if type(value) in (set, frozenset):
            return type(value).__name__, sorted(comparable_bytes(item) for item in value)
        return None


# ----------------------------------------------------------------------------------------------------------- containers
# Nested containers of tensors and other values, as state_dict() methods return them.


_leaf = functools.cache(Leaf)  # one for each device type, so that a pickle contains it once
_row = functools.lru_cache(1024)(Row)


def flatten(value: Any, path: str, values: dict[str, Any]) -> Any:
    """Put the tensors and arrays of nested containers into ``values`` under their paths. Return the remaining tree."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        for key, item in value.items():
            if type(key) is not str or not isinstance(item, Tensor) or not item.is_cpu:
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
    """Return the objects with ``state_dict()`` of which nested lists, tuples and dicts consist, by their paths; none if
    there are other objects, too. Keys that are no text count as positions."""
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


def without_history(value: Any) -> Any:
    """Return nested containers in which results of autograd are leaves with the same memory."""
    values: dict[str, Any] = {}
    tree = flatten(value, "", values)

    def leaf(_: object, name: str, __: torch.device) -> Any:
        found = values[name]
        return found.detach() if isinstance(found, torch.Tensor) and not found.is_leaf else found

    return rebuild_with(leaf, tree, None, None, "", set())


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
