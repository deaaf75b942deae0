"""Export: the tensors of a copy in one safetensors file, with full tensors also for a sharded state.

The data of each part is read once, in chunks, with its checksum. Each chunk is written where its tensors belong, so the
memory that this takes does not depend on the size of the state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import pairwise
from typing import Any

import msgspec

from elasticstate.commits import METADATA, SavedOffsets, Stored, decode
from elasticstate.durable.durable_storage import descriptor
from elasticstate.durable.parts import file_header
from elasticstate.durable.stored_copies import DamagedCopyError, Manifest, Part, StoredCopies
from elasticstate.private import replacing

_MOST_DIMENSIONS = 64  # of a tensor of torch
_Block = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and shape
_KINDS = ("parameters.", "buffers.")  # of a module's tensors, in their names (state/module_state.py)


@dataclass(frozen=True, slots=True)
class _TensorShard:
    """A block of a tensor, in the data of a part."""

    begin: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Tensor:
    """A whole tensor. ``shards[i]`` are the blocks of it in part i."""

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    shards: dict[int, _TensorShard] = field(default_factory=dict)
    begin: int = 0  # in the output file

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class NothingToExportError(Exception):
    """No tensor of a copy was selected; ``values`` are the names of its values."""

    def __init__(self, values: list[str]) -> None:
        super().__init__(values)
        self.values = values


def export(
    copies: StoredCopies, name: str, manifest: Manifest, path: str, value: str | None, progress: Callable[[int], None]
) -> int:
    """Write the tensors of a copy to a file, which replaces ``path`` when it is complete. Return their number.

    ``value``: write only the tensors of this value of the state, under their names in the value. ``progress`` gets the
    number of bytes read after each chunk.

    Raises DamagedCopyError, NothingToExportError, OSError, or errors of the storage.
    """
    tensors = _find(copies, name, manifest)
    chosen = _chosen(tensors, value)
    parent, target = os.path.split(path)
    with (
        descriptor(os.open(parent or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory,
        replacing(directory, target, 0o644) as file,  # in place of a link that somebody has planted
    ):
        file.write(_lay_out(chosen))
        file.flush()
        for number, part in enumerate(manifest.parts):
            _copy(file.fileno(), copies.data(name, part), number, chosen.values(), progress)
        os.fsync(file.fileno())
    return len(chosen)


def _find(copies: StoredCopies, name: str, manifest: Manifest) -> dict[str, _Tensor]:
    """Return all tensors of a copy, whole. Raises DamagedCopyError if its headers contradict themselves."""
    found: dict[str, _Tensor] = {}
    for number, part in enumerate(manifest.parts):
        for key, stored, offsets in _tensors_of(copies, name, part):
            item_bytes = _item_bytes(key, stored, part)
            if len(stored.shape) != len(offsets) or min(offsets, default=0) < 0:
                raise DamagedCopyError(f"{key} has the wrong offsets {offsets}")
            tensor = found.setdefault(key, _Tensor(stored.dtype, item_bytes, stored.shape))
            if tensor.dtype != stored.dtype or len(tensor.shape) != len(offsets):
                raise DamagedCopyError(f"{key} differs between the parts of the copy")
            ends = (offset + size for offset, size in zip(offsets, stored.shape, strict=True))
            tensor.shape = tuple(map(max, zip(tensor.shape, ends, strict=True)))
            tensor.item_bytes = tensor.item_bytes or item_bytes
            tensor.shards[number] = _TensorShard(stored.data_offsets[0], offsets, stored.shape)
    for key, tensor in found.items():
        blocks = sorted({(shard.offsets, shard.shape) for shard in tensor.shards.values()})
        if sum(math.prod(shape) for _, shape in blocks) != math.prod(tensor.shape) or _do_overlap(blocks):
            raise DamagedCopyError(f"shards of {key} are missing, or overlap")
    return found


def _item_bytes(key: str, stored: Stored, part: Part) -> int:
    """Return the size of an item; 0 if the tensor has none. Raises DamagedCopyError if its place is impossible."""
    (begin, end), shape = stored.data_offsets, stored.shape
    count = math.prod(shape) if len(shape) <= _MOST_DIMENSIONS and min(shape, default=0) >= 0 else -1
    item_bytes = (end - begin) // count if count > 0 else 0
    if not 0 <= begin <= end <= part.data_bytes or item_bytes * count != end - begin:
        raise DamagedCopyError(f"{part.tensors.name}: {key} of shape {shape[:8]} cannot be at bytes {begin} to {end}")
    return item_bytes


def _do_overlap(blocks: Iterable[_Block]) -> bool:
    """Return True if two blocks of a tensor, in order of their offsets, have a common item."""
    reached: list[_Block] = []  # blocks that end behind the begin of the present one
    for block in blocks:
        if not math.prod(block[1]):
            continue
        reached = [other for other in reached if not other[0] or other[0][0] + other[1][0] > block[0][0]]
        if any(_have_common_item(block, other) for other in reached):
            return True
        reached.append(block)
    return False


def _have_common_item(one: _Block, two: _Block) -> bool:
    return all(
        max(begin, other) < min(begin + size, other + other_size)
        for begin, size, other, other_size in zip(*one, *two, strict=True)
    )


def _tensors_of(copies: StoredCopies, name: str, part: Part) -> Iterator[tuple[str, Stored, tuple[int, ...]]]:
    """Yield name, place in the part's data, and offsets of each tensor."""
    head = copies.header(name, part)
    try:
        metadata, notes, stored = decode(head)
        tied = notes.tied
        sharding = msgspec.json.decode(metadata.DCP_SHARDING_INFO or "{}", type=dict[str, SavedOffsets])
        owners = {key: stored[tied.get(key, key)] for key in stored}
    except (ValueError, KeyError) as error:  # of msgspec, too
        raise DamagedCopyError(f"{part.tensors.name}: the header is damaged: {error!r}") from None
    own = sorted(item.data_offsets for key, item in stored.items() if key not in tied)
    if any(second[0] < first[1] for first, second in pairwise(own)):
        raise DamagedCopyError(f"{part.tensors.name}: the header is damaged: tensors overlap")
    for key, item in owners.items():
        yield key, item, sharding[key].saved_offsets if key in sharding else (0,) * len(item.shape)


def _chosen(tensors: dict[str, _Tensor], value: str | None) -> dict[str, _Tensor]:
    """Return the tensors to write, by their names in the output. Raises NothingToExportError."""
    chosen = {
        _name_in(key, value): tensor
        for key, tensor in tensors.items()
        if value is None or f"{key}.".startswith(f"{value}.")
    }
    if not chosen:
        raise NothingToExportError(sorted({key.partition(".")[0] for key in tensors}))
    return chosen


def _name_in(key: str, value: str | None) -> str:
    """Return the name of a tensor in its value: for a module, the name in its ``state_dict()``."""
    if value is None or key == value:
        return key
    name = key.removeprefix(f"{value}.")
    return next((name.removeprefix(kind) for kind in _KINDS if name.startswith(kind)), name)


def _lay_out(tensors: dict[str, _Tensor]) -> bytes:
    """Give each tensor its place in the file, and return the header. Large items come first, so all are aligned."""
    at = 0
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].item_bytes):
        tensor.begin, end = at, at + tensor.size_bytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    encoded = file_header(header)
    for tensor in tensors.values():
        tensor.begin += len(encoded)
    return encoded


def _copy(
    fd: int, chunks: Iterable[bytes], part: int, tensors: Iterable[_Tensor], progress: Callable[[int], None]
) -> None:
    """Write the data of a part to the places of its tensors."""
    # Runs may be as short as an item, so there may be as many as the part has items: they are never all in memory.
    coming = merge(*(_runs(tensor, tensor.shards[part]) for tensor in tensors if part in tensor.shards))
    run = next(coming, None)
    longer: list[tuple[int, int, int]] = []  # runs that go on behind a chunk
    at = 0
    for chunk in chunks:
        end = at + len(chunk)
        goes_on = []
        for begun in longer:
            _write_run(fd, chunk, at, begun)
            if begun[0] + begun[2] > end:
                goes_on.append(begun)
        while run is not None and run[0] < end:
            _write_run(fd, chunk, at, run)
            if run[0] + run[2] > end:
                goes_on.append(run)
            run = next(coming, None)
        longer, at = goes_on, end
        progress(len(chunk))


def _write_run(fd: int, chunk: bytes, at: int, run: tuple[int, int, int]) -> None:
    """Write what a chunk, which begins at ``at``, has of a run."""
    begin, target, size = run
    low, high = max(begin, at), min(begin + size, at + len(chunk))
    _write(fd, memoryview(chunk)[low - at : high - at], target + low - begin)


def _runs(tensor: _Tensor, shard: _TensorShard) -> Iterator[tuple[int, int, int]]:
    """Yield (begin in the part's data, place in the output, bytes) of each run of a shard: contiguous in both."""
    outer = len(shard.shape)
    while outer and shard.shape[outer - 1 :] == tensor.shape[outer - 1 :]:
        outer -= 1
    outer = max(0, outer - 1)  # dimension ``outer`` is cut, all behind it are whole
    size = math.prod(shard.shape[outer:]) * tensor.item_bytes
    strides = [math.prod(tensor.shape[i + 1 :]) * tensor.item_bytes for i in range(len(tensor.shape))]
    if not size:
        return
    start = tensor.begin + sum(offset * stride for offset, stride in zip(shard.offsets, strides, strict=True))
    for number in range(math.prod(shard.shape[:outer])):
        place, rest = start, number
        for dimension in reversed(range(outer)):
            rest, index = divmod(rest, shard.shape[dimension])
            place += index * strides[dimension]
        yield shard.begin + number * size, place, size


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
