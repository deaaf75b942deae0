"""Loading: a commit's bytes go straight into the live tensors and arrays that they fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from elasticstate._native import Pieces
from elasticstate.state.buffer import Buffer
from elasticstate.state.copy_stream import CopyStream, CopyStreamOf, copy_stream_of, has_copy_stream
from elasticstate.state.layout import Entry, Frame, Layout, view
from elasticstate.state.plan import dtype_name, plain_address
from elasticstate.state.values import Array, Captured


@dataclass(frozen=True, slots=True)
class Targets:
    """Live tensors and arrays that a commit's bytes fit without a conversion."""

    by_name: dict[str, Array]
    addresses: dict[int, int]  # by offset: addresses that native code writes
    queued: dict[int, tuple[torch.Tensor, Entry]]  # by offset: tensors that the copy stream of their device writes

    def pieces(self, frame: Frame) -> Pieces:
        """Return the pieces that native code copies out of a buffer with this frame."""
        sizes = {entry.offset: entry.size_bytes for entry in frame.layout.entries if entry.size_bytes}
        offsets = sorted(self.addresses)
        return Pieces(
            [self.addresses[offset] for offset in offsets],
            [sizes[offset] for offset in offsets],
            [frame.tensors + offset for offset in offsets],
        )

    def copy_to_devices(self, buffer: Buffer, copy_stream_of: CopyStreamOf) -> None:
        """Copy the bytes of an intact buffer to the tensors on devices. Return after the copies."""
        by_stream: dict[CopyStream, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, entry in self.queued.values():
            copy_stream = copy_stream_of(tensor.device)
            assert copy_stream is not None, "find_targets() has asked for it"
            live, places = by_stream.setdefault(copy_stream, ([], []))
            live.append(tensor)
            places.append(view(buffer.memory, entry, buffer.frame.tensors))
        for copy_stream, (live, places) in by_stream.items():
            buffer.pin(copy_stream)
            copy_stream.copy_back(live, places)


class Incoming(NamedTuple):
    """A received commit that is not sealed yet."""

    targets: Targets  # into which it was copied
    checksum: int


def find_targets(
    layout: Layout, live: Captured, buffers: Iterable[torch.Tensor], copy_stream_of: CopyStreamOf = copy_stream_of
) -> Targets:
    """Return the live values that can be loaded.

    The result is empty if a live value has another shape or dtype than the commit's value of that name, because
    ``apply`` then has to check all values before any is written. The result is also empty if live values overlap each
    other or ``buffers``.
    """
    by_name: dict[str, Array] = {}
    addresses: dict[int, int] = {}
    queued: dict[int, tuple[torch.Tensor, Entry]] = {}
    is_on_device = has_copy_stream(copy_stream_of)
    for entry in layout.entries:
        value = live.get(entry.name)
        address: int | None
        device_tensor: torch.Tensor | None = None
        if isinstance(value, torch.Tensor):
            same = dtype_name(value.dtype) == entry.dtype and value.size() == entry.shape
            device_tensor = value if is_on_device(value) else None
            find = plain_address if device_tensor is None else _device_address
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
            by_name[entry.name] = value
            if device_tensor is not None:
                queued[entry.offset] = device_tensor, entry
    if _overlap(layout, addresses, buffers):
        return Targets({}, {}, {})
    for offset in queued:
        del addresses[offset]
    return Targets(by_name, addresses, queued)


def _overlap(layout: Layout, addresses: dict[int, int], buffers: Iterable[torch.Tensor]) -> bool:
    """Return True if two of the targets or buffers share memory."""
    sizes = {entry.offset: entry.size_bytes for entry in layout.entries if entry.size_bytes}
    ranges = [(buffer.data_ptr(), buffer.data_ptr() + buffer.numel()) for buffer in buffers if buffer.numel()]
    ranges += [(address, address + sizes[offset]) for offset, address in addresses.items()]
    ranges.sort()
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ranges))


def _device_address(tensor: torch.Tensor) -> int | None:
    """Return the address of a device tensor whose bytes are contiguous in any dimension order; otherwise None.

    Copies from and to a device are by value, so the order does not matter. Addresses of all devices of a process
    differ.
    """
    is_dense = tensor.is_contiguous() or any(
        tensor.ndim == ndim and tensor.is_contiguous(memory_format=memory_format)
        for ndim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    return tensor.data_ptr() if is_dense and not tensor.is_conj() and not tensor.is_neg() else None
