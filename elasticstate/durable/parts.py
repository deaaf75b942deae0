"""Parts of a copy: a commit file (state/layout.py) becomes three files, and is read from them again.

The tensors get a header of their own, because readers like torch's HuggingFaceStorageReader expect a file that contains
tensors and nothing else. A tied tensor shares its bytes with another one in a commit; the format forbids that, so its
bytes are repeated behind the data of the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from elasticstate.commits import METADATA, OBJECTS, RANDOM, Metadata, Stored, decode
from elasticstate.durable.durable_storage import Chunk, DurableStorage
from elasticstate.durable.stored_copies import BLOCK_BYTES, DamagedCopyError, File, Part, StoredCopies, crc32c

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class CommitCut:
    """Places in a commit file, and the header of the file with its tensors."""

    random: int  # offset of the random state
    tensors: int  # offset of the tensors: the head ends there
    objects: int  # offset of the objects: the tensors end there
    header: bytes
    is_sharded: bool  # the commit has shards of one worker
    tied: list[tuple[int, int]]  # ranges of the commit file that are repeated behind the tensors


def cut(commit: memoryview) -> CommitCut:
    """Find the parts of a commit file. Raises ValueError if it is none."""
    capacity = int.from_bytes(commit[:8], "little")
    if not 2 <= capacity <= len(commit) - 8:
        raise ValueError("the commit has no header")
    begin = 8 + capacity
    metadata, notes, stored = decode(commit[:begin])
    try:
        random_end, end = stored.pop(RANDOM).data_offsets[1], stored.pop(OBJECTS).data_offsets[0]
        header, tied = _header(stored, metadata, notes.tied, random_end, end)
    except KeyError as error:
        raise ValueError(f"the header of the commit is damaged: it lacks {error}") from None
    if not 0 <= random_end <= end <= len(commit) - begin:
        raise ValueError("the parts of the commit are not in order")
    repeated = [(begin + first, begin + last) for first, last in tied]
    return CommitCut(begin, begin + random_end, begin + end, header, bool(metadata.DCP_SHARDING_INFO), repeated)


def _header(
    stored: dict[str, Stored], metadata: Metadata, tied: dict[str, str], first: int, end: int
) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the header of the file with the tensors, and the ranges that are repeated for tied tensors."""
    ranges = []
    entries: dict[str, Stored] = {}
    for name, item in stored.items():
        start, stop = item.data_offsets
        entries[name] = replace(item, data_offsets=(start - first, stop - first))
    at = end - first
    for name, owner in tied.items():
        start, stop = stored[owner].data_offsets
        ranges.append((start, stop))
        entries[name] = replace(stored[owner], data_offsets=(at, at + stop - start))
        at += stop - start
    if metadata.DCP_SHARDING_INFO:
        metadata = replace(metadata, DCP_SHARDING_INFO=_sharding(metadata.DCP_SHARDING_INFO, entries))
    return file_header({METADATA: metadata, **entries}), ranges


def file_header(content: dict[str, Any]) -> bytes:
    """Return the header of a safetensors file, with its length before it."""
    text = msgspec.json.encode(content)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _sharding(text: str, entries: dict[str, Stored]) -> str:
    """Return offsets for all tensors: a reader that finds offsets of one expects those of each."""
    known: dict[str, Any] = msgspec.json.decode(text)
    offsets = {name: known.get(name) or {"saved_offsets": [0] * len(item.shape)} for name, item in entries.items()}
    return msgspec.json.encode(offsets).decode()


def write_part(
    storage: DurableStorage, folder: str, number: int, digest: int, commit: memoryview, progress: Callable[[int], None]
) -> Part:
    """Write the files of a commit. ``progress`` gets the number of bytes after each chunk.

    Raises ValueError for a commit that is none, and errors of the storage.
    """
    found = cut(commit)

    def write(name: str, chunks: Iterable[Chunk]) -> File:
        size = checksum = 0

        def counted() -> Iterator[Chunk]:
            nonlocal size, checksum
            for chunk in chunks:
                yield chunk
                size, checksum = size + len(chunk), crc32c(chunk, checksum)
                progress(len(chunk))

        storage.write(folder, f"part-{number}.{name}", counted())
        return File(f"part-{number}.{name}", size, checksum)

    ranges = [(found.tensors, found.objects), *found.tied]
    return Part(
        digest=digest,
        head=write("head", _chunks(commit, [(0, found.tensors)])),
        tensors=write("safetensors", (part for parts in ([found.header], _chunks(commit, ranges)) for part in parts)),
        objects=write("objects", _chunks(commit, [(found.objects, len(commit))])),
        data_at=len(found.header),
        header_crc32c=crc32c(found.header),
        data_bytes=found.objects - found.tensors,
        blocks_crc32c=tuple(crc32c(block) for block in _chunks(commit, ranges[:1])),
    )


def _chunks(data: memoryview, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
    for begin, end in ranges:
        for at in range(begin, end, BLOCK_BYTES):
            yield data[at : min(end, at + BLOCK_BYTES)]


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
