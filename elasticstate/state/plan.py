"""Plan: the mapping from live tensors to a buffer. It is checked at each commit, and rebuilt after any change."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

from elasticstate._native import Pieces
from elasticstate.commit_header import NO_SHARDING, Sharding
from elasticstate.errors import StateError
from elasticstate.state.copy_stream import CopyStreamOf, copy_stream_of, has_copy_stream
from elasticstate.state.layout import ALIGNMENT_BYTES, Entry, Header, lay_out, round_up, view
from elasticstate.state.values import Array

Tensor = torch.Tensor
Described: TypeAlias = "tuple[str, str, tuple[int, ...], int, object]"  # see layout.lay_out

RANDOM_GRANULE_BYTES = 4096
RANDOM_SLACK_BYTES = 1024  # the pickle of the random state varies by some bytes

# Everything that decides how the bytes of a tensor are copied, including changes made in place. One C call each.
_FEATURES: tuple[Callable[[Tensor], Any], ...] = (
    type,
    Tensor.data_ptr,
    Tensor.size,
    Tensor.is_contiguous,  # cheaper than the strides, and enough when it is true
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.is_neg,
)


class Plan:
    """Destinations of the given tensors and arrays. A plan is valid as long as ``fits`` returns True."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        arrays: dict[str, np.ndarray[Any, Any]],
        random_bytes: int,
        last: Plan | None,
        copy_stream_of: CopyStreamOf = copy_stream_of,
        sharding: Sharding = NO_SHARDING,
    ) -> None:
        described = [_describe_tensor(name, tensor) for name, tensor in tensors.items()]
        described += [_describe_array(name, array) for name, array in arrays.items()]
        layout = lay_out(described)
        is_same = last is not None and last.header.layout == layout and last.header.frame.sharding == sharding
        if last is not None and is_same and last.capacity_for(random_bytes):
            self.random_bytes: int = last.random_bytes
            self.header: Header = last.header
        else:
            self.random_bytes = random_capacity(random_bytes)
            self.header = Header(layout, self.random_bytes, sharding)
        self.layout = self.header.layout
        self._names = list(tensors)
        self._features = [list(map(feature, tensors.values())) for feature in _FEATURES]
        self._rare = self._rare_features(tensors.values())
        self._arrays = _array_features(arrays)
        self.odd: list[tuple[str, Entry]] = []
        self.queued: list[tuple[str, Entry]] = []
        self.pieces = self._make_pieces([*tensors.values(), *arrays.values()], copy_stream_of)

    def fits(
        self,
        tensors: dict[str, Tensor],
        arrays: dict[str, np.ndarray[Any, Any]],
        random_bytes: int,
        sharding: Sharding = NO_SHARDING,
    ) -> bool:
        """Return True if this plan is valid for these values as they are now. It detects any change made in place."""
        if (
            not self.capacity_for(random_bytes)
            or sharding != self.header.frame.sharding
            or list(tensors) != self._names
            or _array_features(arrays) != self._arrays
        ):
            return False
        try:
            return all(
                _are_equal(feature, tensors.values(), known)
                for feature, known in zip(_FEATURES, self._features, strict=True)
            ) and self._rare == self._rare_features(tensors.values())
        except RuntimeError:  # a tensor without memory, such as a sparse one: making a plan raises the exact error
            return False

    def capacity_for(self, random_bytes: int) -> bool:
        """Return True if ``random_bytes`` bytes of random state fit into the reserved part."""
        return random_bytes + 8 <= self.random_bytes

    def _rare_features(self, tensors: Iterable[Tensor]) -> list[object]:
        """Return the strides of tensors with holes, and the conjugate bits of complex tensors."""
        _, _, _, contiguous, dtypes, _ = self._features
        found: list[object] = []
        if not all(contiguous):
            found += [t.stride() for t, whole in zip(tensors, contiguous, strict=True) if not whole]
        if any(dtype.is_complex for dtype in set(dtypes)):
            found += [t.is_conj() for t, dtype in zip(tensors, dtypes, strict=True) if dtype.is_complex]
        return found

    def _make_pieces(self, values: list[Array], copy_stream_of: CopyStreamOf) -> Pieces:
        """Return the pieces that native code copies, and record the rest in ``queued`` and ``odd``.

        ``queued``: tensors that the copy stream of their device copies. ``odd``: tensors with holes, tensors whose
        stored bits differ from their values, and tensors on a device without a copy stream.
        """
        placed: dict[int, tuple[int, int]] = {}
        is_on_device = has_copy_stream(copy_stream_of)
        for value, entry in zip(values, self.layout.entries, strict=True):
            if not entry.size_bytes or entry.offset in placed:
                continue
            is_queued = isinstance(value, torch.Tensor) and is_on_device(value)
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


def _are_equal(feature: Callable[[Tensor], Any], tensors: Iterable[Tensor], known: list[Any]) -> bool:
    """Return True if the feature of all tensors is as known. Lists are compared in half the time, but many sizes, which
    are tuples, would let the garbage collector run."""
    found = map(feature, tensors)
    return all(map(operator.eq, found, known)) if feature is Tensor.size else list(found) == known


def address(value: Array) -> int | None:
    """Return the CPU address of the first element; None for values on other devices or without memory."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.is_cpu and value.layout is torch.strided else None
    return _array_address(value) if value.size else None


def plain_address(value: Array) -> int | None:
    """Return the CPU address of a value's bytes in C order; None if the value is not stored like that."""
    if isinstance(value, torch.Tensor):
        plain = value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
        return value.data_ptr() if plain else None
    return _array_address(value) if value.flags.c_contiguous else None


def copy_odd(memory: Tensor, values: dict[str, Array], odd: Iterable[tuple[str, Entry]], begin: int) -> None:
    """Copy values that are not plain memory with torch and numpy. Return when all copies are complete."""
    for name, entry in odd:
        value, place = values[name], view(memory, entry, begin)
        if isinstance(value, torch.Tensor):
            place.copy_(value.detach())
        else:
            np.copyto(place, value)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype)


def random_capacity(random_bytes: int) -> int:
    """Return the number of bytes to reserve for a random state of ``random_bytes`` bytes."""
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
    check_dense(name, tensor)
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    bits = tensor.is_conj(), tensor.is_neg()
    key = (tensor.device, tensor.data_ptr(), dtype, shape, tensor.stride(), bits)
    return name, dtype, shape, tensor.numel() * tensor.element_size(), key


def check_dense(name: str, tensor: Tensor) -> None:
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
    raise StateError(
        f"state.{name} is a {kind}. A commit holds only dense tensors that are whole on every rank: keep this value "
        f"outside the state, or capture it as dense tensors."
    )
