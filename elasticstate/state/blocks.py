"""Blocks of tensors, and the contiguous runs of bytes that they consist of in two places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from elasticstate._native import copy_runs
from elasticstate.commit_header import Shard

STAGING_BYTES = 64 << 20
"""Size of the buffer for blocks that cannot be read directly into their target."""
RUN_BYTES = 8 << 10
"""One more range in a request costs about as much as these bytes."""


class Box(NamedTuple):
    """A block of a tensor: ``begin[d] <= index[d] < end[d]``."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def is_empty(self) -> bool:
        return any(end <= begin for begin, end in zip(self.begin, self.end, strict=True))

    def within(self, other: Box) -> Box:
        """Return the common part, which may be empty."""
        return Box(tuple(map(max, self.begin, other.begin)), tuple(map(min, self.end, other.end)))

    def without(self, other: Box) -> Iterator[Box]:
        """Yield disjoint blocks that make up what is not in ``other``, a part of this block."""
        begin, end = list(self.begin), list(self.end)
        for d in range(len(begin)):
            if begin[d] < other.begin[d]:
                yield Box(tuple(begin), (*end[:d], other.begin[d], *end[d + 1 :]))
            if other.end[d] < end[d]:
                yield Box((*begin[:d], other.end[d], *begin[d + 1 :]), tuple(end))
            begin[d], end[d] = other.begin[d], other.end[d]

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        return Box(
            tuple(at - start for at, start in zip(self.begin, origin, strict=True)),
            tuple(at - start for at, start in zip(self.end, origin, strict=True)),
        )

    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.begin, self.end))


def box_of(shard: Shard, sizes: Sequence[int]) -> Box:
    return Box(shard.offsets, tuple(offset + size for offset, size in zip(shard.offsets, sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A block to read. ``at`` is the block in the stored part, ``into`` that in the target."""

    offset: int  # of the stored part in the file
    stored: tuple[int, ...]  # sizes of the stored part
    at: Box
    target: torch.Tensor
    into: Box


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which can be written."""
    content: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return content


def copy_ranges(memory: Any, ranges: Sequence[tuple[int, memoryview]]) -> None:
    """Copy bytes of mapped memory: (offset there, where to put them). Many bytes by several threads, without the GIL.

    Raises ValueError if a range is outside the memory.
    """
    found = [(offset, np.frombuffer(target, np.uint8)) for offset, target in ranges if len(target)]
    addresses = [target.__array_interface__["data"][0] for _, target in found]
    copy_runs(memory, [offset for offset, _ in found], [target.nbytes for _, target in found], addresses)


def _strides(sizes: Sequence[int], item_bytes: int) -> list[int]:
    strides = [item_bytes] * len(sizes)
    for d in range(len(sizes) - 2, -1, -1):
        strides[d] = strides[d + 1] * sizes[d + 1]
    return strides


def _outer_dimensions(item: BlockRead, sizes: tuple[int, ...]) -> int:
    """Return the number of dimensions over which a run does not extend that is contiguous in both tensors.

    ``sizes``: of the contiguous tensor that gets the bytes.
    """
    block = item.at.sizes
    d = len(block)
    while d > 1 and block[d - 1] == item.stored[d - 1] == sizes[d - 1]:
        d -= 1
    return max(0, d - 1)


def runs(
    item: BlockRead, content: memoryview, sizes: tuple[int, ...], begin: tuple[int, ...]
) -> Iterator[tuple[int, memoryview]]:
    """Yield the contiguous runs of an item: (offset in the file, place in a contiguous tensor of ``sizes``).

    ``begin``: where the block begins in that tensor.
    """
    item_bytes = item.target.element_size()
    block = item.at.sizes
    outer = _outer_dimensions(item, sizes)
    run = math.prod(block[outer:]) * item_bytes
    from_strides, to_strides = _strides(item.stored, item_bytes), _strides(sizes, item_bytes)
    at = item.offset + sum(map(int.__mul__, item.at.begin, from_strides))
    to = sum(map(int.__mul__, begin, to_strides))
    for index in itertools.product(*map(range, block[:outer])):
        here = to + sum(map(int.__mul__, index, to_strides))
        yield at + sum(map(int.__mul__, index, from_strides)), content[here : here + run]


def prefers_span(item: BlockRead) -> bool:
    """Return True if it is cheaper to read the rows of the stored part whole than to read each run of an item.

    False for a single run, which needs no staging buffer.
    """
    block = item.at.sizes
    if len(block) < 2:
        return False
    outer = _outer_dimensions(item, tuple(item.target.shape))
    needed = math.prod(block) * item.target.element_size()
    span = _span_bytes(item)
    row = math.prod(item.stored[1:]) * item.target.element_size()
    return row <= STAGING_BYTES and span < needed + (math.prod(block[:outer]) - 1) * RUN_BYTES


def _span_bytes(item: BlockRead) -> int:
    return item.at.sizes[0] * math.prod(item.stored[1:]) * item.target.element_size()


def staged_bytes(item: BlockRead) -> int:
    return _span_bytes(item) if prefers_span(item) else math.prod(item.at.sizes) * item.target.element_size()


def in_pieces(item: BlockRead) -> Iterator[BlockRead]:
    """Yield parts of an item that fit into the staging buffer: halves of its first long dimension, again and again."""
    if staged_bytes(item) <= STAGING_BYTES:
        yield item
        return
    d = next(d for d, size in enumerate(item.at.sizes) if size > 1)
    half = item.at.sizes[d] // 2
    for first in (True, False):
        at, into = (_half(box, d, half, first) for box in (item.at, item.into))
        yield from in_pieces(BlockRead(item.offset, item.stored, at, item.target, into))


def _half(box: Box, d: int, size: int, first: bool) -> Box:
    middle = box.begin[d] + size
    if first:
        return Box(box.begin, (*box.end[:d], middle, *box.end[d + 1 :]))
    return Box((*box.begin[:d], middle, *box.begin[d + 1 :]), box.end)


def staged(
    item: BlockRead, staging: torch.Tensor, content: memoryview
) -> tuple[list[tuple[int, memoryview]], tuple[torch.Tensor, torch.Tensor]]:
    """Return the ranges to read into the staging buffer, and then the copy: (block of the target, its value)."""
    block, dtype = item.at.sizes, item.target.dtype
    target = item.target.detach()[item.into.slices()]
    size = staged_bytes(item)
    if prefers_span(item):
        rows = staging[:size].view(dtype).view(block[0], *item.stored[1:])
        at = item.offset + item.at.begin[0] * (size // block[0])
        return [(at, content[:size])], (
            target,
            rows[item.at.relative_to((item.at.begin[0], *[0] * (len(block) - 1))).slices()],
        )
    value = staging[:size].view(dtype).view(block)
    return list(runs(item, content, block, (0,) * len(block))), (target, value)
