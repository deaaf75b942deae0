"""The bytes of a commit: two kept buffers, written in turn.

One buffer is one flat run of bytes, described by its header::

    | tensor | pad | tensor | pad | ... | objects (one pickle) |  slack
    0              64-byte aligned      objects_offset         size_bytes

A buffer is kept as long as it is big enough: the first touch of fresh memory costs several times the copy itself. The
older buffer is the one that is overwritten, and its commit id is set last: whatever goes wrong in between, the newest
commit stays whole.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import msgspec
import numpy as np
import torch

from elasticstate._native import gather
from elasticstate.core.types import CommitId
from elasticstate.errors import StateError

ALIGNMENT_BYTES = 64
GRANULE_BYTES = 1 << 16  # the pickle of the objects grows by a few bytes now and then: no new buffer for that

Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
Captured: TypeAlias = Mapping[str, Any]  # name -> tensor | numpy array | picklable object


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One tensor or array in the flat bytes, in C order. ``dtype``: ``"torch.float32"``, or numpy's ``"<f4"``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class Header(msgspec.Struct, array_like=True, frozen=True):
    """Where everything lies in the flat bytes. Tied tensors have entries of their own and share the bytes."""

    entries: list[Entry]
    objects_offset: int
    size_bytes: int


def is_array(value: object) -> bool:
    """Whether a value travels as tensor bytes: a torch tensor, or a numpy array of plain numbers or strings."""
    return isinstance(value, torch.Tensor) or (type(value) is np.ndarray and value.dtype.kind in "biufcSUmM")


def write_into(target: object, value: Array, device: torch.device | None = None) -> Array:
    """Copy ``value`` into ``target`` if that is a like tensor or array; otherwise make an own copy. Returns which.

    ``device`` is where a tensor is made; None: where ``target`` is if that is a tensor, else the CPU.
    """
    if not isinstance(value, torch.Tensor):
        if type(target) is np.ndarray and _alike(target, value) and target.flags.writeable:
            np.copyto(target, value)
            return target
        return np.array(value)
    if not isinstance(target, torch.Tensor):
        return value.to(device or "cpu", copy=True)
    device = device or target.device
    if _alike(target, value) and target.device.type == device.type:
        with torch.no_grad():
            target.copy_(value)
        return target
    return value.to(device, copy=True)


def _alike(target: Array, value: Array) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


class Snapshot:
    """The two last commits of one worker. Not thread-safe: one thread writes and reads."""

    def __init__(self) -> None:
        self._newer = _Buffer()
        self._older = _Buffer()

    @property
    def newest(self) -> CommitId | None:
        """The id of the last sealed commit."""
        return self._newer.commit

    @property
    def previous(self) -> CommitId | None:
        """The id of the commit before it; None also while, and if, its buffer could not be overwritten."""
        return self._older.commit

    @property
    def size_bytes(self) -> int:
        """Of the newest commit."""
        return self._newer.header.size_bytes

    def reserve(self, size_bytes: int) -> None:
        """Take memory for two commits of this size, and touch it: what is held already stays as it is."""
        for buffer in (self._newer, self._older):
            if buffer.commit is None:
                buffer.make_room(size_bytes)
                buffer.memory.zero_()

    def write(self, captured: Captured, private: bytes, commit: CommitId) -> None:
        """Copy ``captured`` into the older buffer and seal it as ``commit``. ``private`` is never sent to others.

        Raises:
            StateError: something cannot be pickled, or is no dense tensor (the message names it). Both earlier commits
                are whole then; after any later error the newest one is.
        """
        objects = {name: value for name, value in captured.items() if not is_array(value)}
        blob = _dumps(objects)
        header, arrays = _lay_out({name: value for name, value in captured.items() if is_array(value)}, len(blob))
        memory = self._older.begin(header)
        _copy(memory, arrays, blob, header.objects_offset)
        self._seal_older(private, commit)

    def read(self, commit: CommitId) -> dict[str, Any]:
        """What was captured for ``commit``. Tensors and arrays are views of the buffer: copy them, never keep them.

        Raises StateError if that commit is not held.
        """
        buffer = self._find(commit)
        header = buffer.header
        objects: Any = buffer.memory[header.objects_offset : header.size_bytes].numpy()
        values: dict[str, Any] = pickle.loads(objects)
        for entry in header.entries:
            values[entry.name] = _view(buffer.memory, entry)
        return values

    def read_private(self, commit: CommitId) -> bytes:
        """The part of ``commit`` that is this worker's alone."""
        return self._find(commit).private

    def restamp(self, commit: CommitId) -> None:
        """Give the newest commit another id. Raises StateError if there is none."""
        if self._newer.commit is None:
            raise StateError(f"there is no commit that could become {commit}")
        self._newer.commit = commit

    def forget(self) -> None:
        """No commit is held any more; the memory is kept."""
        self._newer.commit = self._older.commit = None

    def outgoing(self) -> tuple[bytes, torch.Tensor]:
        """The newest commit as (header, flat bytes) for those who lack it; without the private part."""
        header = self._newer.header
        return msgspec.msgpack.encode(header), self._newer.memory[: header.size_bytes]

    def incoming(self, header: bytes) -> torch.Tensor:
        """Begin to receive a commit: ``uint8[n]`` of the older buffer, to be filled and then sealed."""
        decoded = msgspec.msgpack.decode(header, type=Header)
        return self._older.begin(decoded)[: decoded.size_bytes]

    def seal_incoming(self, private: bytes, commit: CommitId) -> None:
        """Seal what was received as the only commit: whoever lacked the job's state holds nothing else of worth."""
        self._seal_older(private, commit)
        self._older.commit = None

    def aliases(self, captured: Captured) -> list[str]:
        """Names of the captured tensors and arrays that lie in one of the buffers."""
        addresses = {name: _address(value) for name, value in captured.items() if is_array(value)}
        return [name for name, at in addresses.items() if self._newer.contains(at) or self._older.contains(at)]

    def _seal_older(self, private: bytes, commit: CommitId) -> None:
        self._older.private = private
        self._older.commit = commit
        self._newer, self._older = self._older, self._newer

    def _find(self, commit: CommitId) -> _Buffer:
        for buffer in (self._newer, self._older):
            if buffer.commit == commit:
                return buffer
        raise StateError(f"commit {commit} is not held, only {self.newest} and {self.previous}")


class _Buffer:
    """Memory for one commit. ``commit`` is None while it holds none, or half of one."""

    def __init__(self) -> None:
        self.commit: CommitId | None = None
        self.header = Header([], 0, 0)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.private = b""

    def begin(self, header: Header) -> torch.Tensor:
        """Make room for what ``header`` describes; what was here is given up. Returns all the memory."""
        self.commit = None
        self.header = header
        self.make_room(header.size_bytes)
        return self.memory

    def make_room(self, size_bytes: int) -> None:
        if self.memory.numel() < size_bytes:
            self.memory = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
            self.memory = torch.empty(_round_up(size_bytes, GRANULE_BYTES), dtype=torch.uint8)

    def contains(self, address: int | None) -> bool:
        start = self.memory.data_ptr()
        return address is not None and start <= address < start + self.memory.numel()


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _address(value: Array) -> int | None:
    """Where the first element lies in the memory of the CPU; None for what is empty or on a device."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.device.type == "cpu" and value.numel() else None
    return int(value.__array_interface__["data"][0]) if value.size else None


def _dumps(objects: dict[str, Any]) -> bytes:
    """Pickle by reference where that works: all workers run one script, and its classes stay themselves everywhere."""
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


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    # Wrapper subclasses (DTensor, quantised weights) have __tensor_flatten__ and no bytes of their own.
    if tensor.layout is not torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        kind = f"{type(tensor).__name__} with layout {tensor.layout}"
    elif tensor.is_meta:
        kind = "tensor on the meta device"
    elif torch.nn.parameter.is_lazy(tensor):
        kind = "lazy parameter that has no shape yet"
    else:
        return
    raise StateError(f"state.{name} is a {kind}: only dense tensors that are whole on every rank can be committed")


def _lay_out(arrays: dict[str, Array], blob_bytes: int) -> tuple[Header, list[tuple[Array, Entry]]]:
    """The header, and the arrays to be copied: each of the tied ones once."""
    seen: dict[tuple[object, ...], Entry] = {}
    entries: list[Entry] = []
    unique: list[tuple[Array, Entry]] = []
    end = 0
    for name, value in arrays.items():
        if isinstance(value, torch.Tensor):
            _check_dense(name, value)
            dtype, shape, strides = str(value.dtype), tuple(value.shape), value.stride()
            key: tuple[object, ...] = (
                value.device,
                value.data_ptr(),
                dtype,
                shape,
                strides,
                value.is_conj(),
                value.is_neg(),
            )
            size_bytes = value.numel() * value.element_size()
        else:
            dtype, shape = value.dtype.str, value.shape
            key = ("numpy", value.__array_interface__["data"][0], dtype, shape, value.strides)
            size_bytes = value.nbytes
        first = seen.get(key)
        if first is not None:
            entries.append(Entry(name, dtype, shape, first.offset, size_bytes))
            continue
        entry = Entry(name, dtype, shape, _round_up(end, ALIGNMENT_BYTES), size_bytes)
        end = entry.offset + size_bytes
        seen[key] = entry
        entries.append(entry)
        unique.append((value, entry))
    return Header(entries, end, end + blob_bytes), unique


def _copy(memory: torch.Tensor, arrays: list[tuple[Array, Entry]], blob: bytes, blob_offset: int) -> None:
    sources: list[Any] = [np.frombuffer(blob, dtype=np.uint8)]
    offsets = [blob_offset]
    for value, entry in arrays:
        if not entry.size_bytes:
            continue
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or not value.is_contiguous() or value.is_conj() or value.is_neg():
                _view(memory, entry).copy_(value.detach())
                continue
            sources.append(value.detach().view(-1).view(torch.uint8).numpy())
        else:
            sources.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        offsets.append(entry.offset)
    gather(memory, sources, offsets)


def _view(memory: torch.Tensor, entry: Entry) -> Any:
    """The tensor or array that lies at an entry, without a copy."""
    flat = memory[entry.offset : entry.offset + entry.size_bytes]
    if entry.dtype.startswith("torch."):
        dtype: torch.dtype = getattr(torch, entry.dtype.removeprefix("torch."))
        return flat.view(dtype).view(entry.shape)
    return np.ndarray(entry.shape, np.dtype(entry.dtype), flat.numpy())
