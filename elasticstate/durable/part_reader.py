"""PartReader: the bytes of a commit by their offsets in the commit file, from the three files of a part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from elasticstate.durable.copies import BLOCK_BYTES, DamagedCopyError, Part
from elasticstate.durable.reader import StoredCopies

Ranges = Sequence[tuple[int, memoryview]]
"""Offsets in a commit file, and where to put the bytes from there on."""


class PartReader:
    """Reader of one part of a copy. Every method raises what those of ``StoredCopies`` raise."""

    def __init__(self, copies: StoredCopies, name: str, part: Part) -> None:
        self._copies = copies
        self._name = name
        self._part = part
        self._data = part.head.bytes
        self._objects = part.head.bytes + part.data_bytes
        self.length = self._objects + part.objects.bytes
        """Size of the commit, in bytes."""

    @cached_property
    def head(self) -> bytes:
        """All bytes before the tensors: the header of the commit, and the random state."""
        return self._copies.file(self._name, self._part.head)

    @cached_property
    def objects(self) -> bytes:
        """All bytes behind the tensors."""
        return self._copies.file(self._name, self._part.objects)

    def read_into(self, ranges: Ranges) -> None:
        """Read ranges of the commit. Only verified bytes are written. Blocks of the file are read at most once."""
        in_order = sorted(ranges, key=lambda item: item[0])
        if in_order and in_order[0][0] < self._data:
            _copy(in_order, 0, self.head)
        if any(offset + len(place) > self._objects for offset, place in in_order):
            _copy(in_order, self._objects, self.objects)
        wanted, first = _blocks(in_order, self._data, self._objects), 0
        for index, block in self._copies.blocks(self._name, self._part, wanted):
            at = self._data + index * BLOCK_BYTES
            while in_order[first][0] + len(in_order[first][1]) <= at:
                first += 1
            _copy(in_order[first:], at, block)
        if any(offset + len(place) > self.length for offset, place in in_order):
            raise DamagedCopyError(f"{self._name} has a commit of {self.length} bytes, which is too short")


def _blocks(ranges: Ranges, begin: int, end: int) -> list[int]:
    """Return the blocks of the data, which is at [begin, end) of the commit, that the ranges touch, ascending."""
    found: set[int] = set()
    for offset, place in ranges:
        low, high = max(offset, begin) - begin, min(offset + len(place), end) - begin
        if low < high:
            found.update(range(low // BLOCK_BYTES, (high - 1) // BLOCK_BYTES + 1))
    return sorted(found)


def _copy(ranges: Ranges, at: int, data: bytes) -> None:
    """Copy bytes of the commit from ``at`` on to all places of the ranges, which are in order."""
    content, end = memoryview(data), at + len(data)
    for offset, place in ranges:
        if offset >= end:
            break
        low, high = max(offset, at), min(offset + len(place), end)
        if low < high:
            place[low - offset : high - offset] = content[low - at : high - at]
