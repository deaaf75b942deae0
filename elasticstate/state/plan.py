"""How live tensors get into a buffer: made once, looked over at each commit, made anew when anything has changed."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from elasticstate._native import Pieces
from elasticstate.errors import StateError
from elasticstate.state.layout import ALIGNMENT_BYTES, Entry, Header, Layout, lay_out, round_up, view
from elasticstate.state.queue import QueueOf, has_queue, queue_of
from elasticstate.state.values import Array, Captured

Tensor = torch.Tensor
Described: TypeAlias = "tuple[str, str, tuple[int, ...], int, object]"  # see layout.lay_out

RANDOM_GRANULE_BYTES = 4096
RANDOM_SLACK_BYTES = 1024  # the random state's pickle varies by some bytes

# All that decides how the bytes of a tensor are copied: whatever was done to it in place. One C call each.
_FEATURES: tuple[Callable[[Tensor], Any], ...] = (
    type,
    Tensor.data_ptr,
    Tensor.size,
    Tensor.is_contiguous,  # cheaper than the strides, and says all about them if it is true
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.is_neg,
)


class Plan:
    """Where each of the given tensors and arrays goes. Holds as long as ``fits`` says so."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        arrays: dict[str, np.ndarray[Any, Any]],
        random_bytes: int,
        last: Plan | None,
        queue_of: QueueOf = queue_of,
    ) -> None:
        described = [_describe_tensor(name, tensor) for name, tensor in tensors.items()]
        described += [_describe_array(name, array) for name, array in arrays.items()]
        layout = lay_out(described)
        if last is not None and last.room_for(random_bytes) and last.header.layout == layout:
            self.random_bytes: int = last.random_bytes
            self.header: Header = last.header
        else:
            self.random_bytes = random_room(random_bytes)
            self.header = Header(layout, self.random_bytes)
        self.layout = self.header.layout
        self._names = list(tensors)
        self._features = [list(map(feature, tensors.values())) for feature in _FEATURES]
        self._rare = self._rare_features(tensors.values())
        self._arrays = _array_features(arrays)
        self.odd: list[tuple[str, Entry]] = []
        self.queued: list[tuple[str, Entry]] = []
        self.pieces = self._make_pieces([*tensors.values(), *arrays.values()], queue_of)

    def fits(self, tensors: dict[str, Tensor], arrays: dict[str, np.ndarray[Any, Any]], random_bytes: int) -> bool:
        """Whether this is the plan for these, as they are now: nothing is missed, whatever was changed in place."""
        if not self.room_for(random_bytes) or list(tensors) != self._names or _array_features(arrays) != self._arrays:
            return False
        try:
            return all(
                all(map(operator.eq, map(feature, tensors.values()), known))
                for feature, known in zip(_FEATURES, self._features, strict=True)
            ) and self._rare == self._rare_features(tensors.values())
        except RuntimeError:  # a tensor without memory, such as a sparse one: what is wrong is said when a plan is made
            return False

    def room_for(self, random_bytes: int) -> bool:
        """Whether so much random state fits into the part that is kept for it."""
        return random_bytes + 8 <= self.random_bytes

    def _rare_features(self, tensors: Iterable[Tensor]) -> list[object]:
        """The strides of those with holes, and the conjugate bits of the complex ones."""
        _, _, _, contiguous, dtypes, _ = self._features
        found: list[object] = []
        if not all(contiguous):
            found += [t.stride() for t, whole in zip(tensors, contiguous, strict=True) if not whole]
        if any(dtype.is_complex for dtype in set(dtypes)):
            found += [t.is_conj() for t, dtype in zip(tensors, dtypes, strict=True) if dtype.is_complex]
        return found

    def _make_pieces(self, values: list[Array], queue_of: QueueOf) -> Pieces:
        """What native code copies. The rest goes by the queue of its device, or is odd: with holes, or not stored as it
        reads, or on a device that has none."""
        placed: dict[int, tuple[int, int]] = {}
        is_far = has_queue(queue_of)
        for value, entry in zip(values, self.layout.entries, strict=True):
            if not entry.size_bytes or entry.offset in placed:
                continue
            is_queued = isinstance(value, torch.Tensor) and is_far(value)
            address = None if is_queued else plain_address(value)
            placed[entry.offset] = (address or 0, entry.size_bytes)
            if is_queued:
                self.queued.append((entry.name, entry))
            elif address is None:
                self.odd.append((entry.name, entry))
        self.queued.sort(key=lambda pair: pair[1].offset)
        begin = self.header.frame.tensors
        offsets = sorted(placed)
        return Pieces(
            [placed[offset][0] for offset in offsets],
            [placed[offset][1] for offset in offsets],
            [begin + offset for offset in offsets],
        )


def address(value: Array) -> int | None:
    """Where the first element lies in the memory of the CPU; None for what is elsewhere, or nowhere."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.is_cpu and value.layout is torch.strided else None
    return _array_address(value) if value.size else None


def plain_address(value: Array) -> int | None:
    """Where the bytes of a value lie in the memory of the CPU, in C order; None if they do not."""
    if isinstance(value, torch.Tensor):
        plain = value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
        return value.data_ptr() if plain else None
    return _array_address(value) if value.flags.c_contiguous else None


@dataclass(frozen=True, slots=True)
class Targets:
    """Live tensors and arrays that take a commit's bytes as they are."""

    found: dict[str, Array]
    addresses: dict[int, int]  # of those that native code writes, by offset
    queued: dict[int, tuple[Tensor, Entry]]  # those that come by the queue of their device, by offset


def targets(layout: Layout, live: Captured, buffers: Iterable[Tensor], queue_of: QueueOf = queue_of) -> Targets:
    """None if one has another shape or dtype than the commit's of that name (then ``apply`` is to look at all of them
    before anything is written), or if they overlap."""
    found: dict[str, Array] = {}
    addresses: dict[int, int] = {}
    queued: dict[int, tuple[Tensor, Entry]] = {}
    is_far = has_queue(queue_of)
    ranges = [(buffer.data_ptr(), buffer.data_ptr() + buffer.numel()) for buffer in buffers if buffer.numel()]
    for entry in layout.entries:
        value = live.get(entry.name)
        address: int | None
        far: Tensor | None = None
        if isinstance(value, torch.Tensor):
            same = _dtype_name(value.dtype) == entry.dtype and value.size() == entry.shape
            far = value if is_far(value) else None
            find = plain_address if far is None else _far_address
            address = find(value) if same and value.layout is torch.strided else None
        elif isinstance(value, np.ndarray):
            same = value.dtype.str == entry.dtype and value.shape == entry.shape
            address = plain_address(value) if same and value.flags.writeable else None
        else:
            continue
        if not same:
            return Targets({}, {}, {})
        if address is None or not entry.size_bytes:
            continue
        if addresses.setdefault(entry.offset, address) == address:
            found[entry.name] = value
            if far is not None:
                queued[entry.offset] = far, entry
    sizes = {entry.offset: entry.size_bytes for entry in layout.entries if entry.size_bytes}
    ranges += [(address, address + sizes[offset]) for offset, address in addresses.items()]
    ranges.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ranges)):
        return Targets({}, {}, {})
    for offset in queued:
        del addresses[offset]
    return Targets(found, addresses, queued)


def _far_address(tensor: Tensor) -> int | None:
    """Of one on a device whose bytes lie together, in any order, as copies from and to there are by value. Addresses of
    all devices of a process differ."""
    is_dense = tensor.is_contiguous() or any(
        tensor.ndim == ndim and tensor.is_contiguous(memory_format=memory_format)
        for ndim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    return tensor.data_ptr() if is_dense and not tensor.is_conj() and not tensor.is_neg() else None


def copy_odd(memory: Tensor, values: dict[str, Array], odd: Iterable[tuple[str, Entry]], begin: int) -> None:
    """Let torch and numpy copy what is no plain memory. Returns when all of it is there."""
    for name, entry in odd:
        value, place = values[name], view(memory, entry, begin)
        if isinstance(value, torch.Tensor):
            place.copy_(value.detach())
        else:
            np.copyto(place, value)


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype)


def random_room(random_bytes: int) -> int:
    """Bytes to keep for a random state of this size."""
    assert RANDOM_GRANULE_BYTES % ALIGNMENT_BYTES == 0
    return round_up(8 + random_bytes + RANDOM_SLACK_BYTES, RANDOM_GRANULE_BYTES)


def _array_address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _array_features(arrays: dict[str, np.ndarray[Any, Any]]) -> list[object]:
    return [(name, _array_address(a), a.dtype, a.shape, a.strides) for name, a in arrays.items()]


def _describe_array(name: str, array: np.ndarray[Any, Any]) -> Described:
    dtype, shape = array.dtype.str, array.shape
    return name, dtype, shape, array.nbytes, ("numpy", _array_address(array), dtype, shape, array.strides)


def _describe_tensor(name: str, tensor: Tensor) -> Described:
    _check_dense(name, tensor)
    dtype, shape = _dtype_name(tensor.dtype), tuple(tensor.shape)
    bits = tensor.is_conj(), tensor.is_neg()
    key = (tensor.device, tensor.data_ptr(), dtype, shape, tensor.stride(), bits)
    return name, dtype, shape, tensor.numel() * tensor.element_size(), key


def _check_dense(name: str, tensor: Tensor) -> None:
    # Wrapper subclasses (DTensor, quantised weights) have __tensor_flatten__ and no bytes of their own.
    if tensor.layout is not torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        kind = f"{type(tensor).__name__} with layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = f"quantised tensor of {tensor.dtype}"
    elif tensor.is_meta:
        kind = "tensor on the meta device"
    elif torch.nn.parameter.is_lazy(tensor):
        kind = "lazy parameter that has no shape yet"
    else:
        return
    raise StateError(f"state.{name} is a {kind}: only dense tensors that are whole on every rank can be committed")
