"""Export: the tensors of a copy in one safetensors file, with full tensors also for a sharded state.

The data of each part is read once, in chunks, with its checksum. Each chunk is written where its tensors belong, so the
memory that this takes does not depend on the size of the state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elasticstate.durable.copies import DamagedCopyError, Manifest, Part
from elasticstate.durable.parts import METADATA, OWN, SHARDING
from elasticstate.durable.reader import StoredCopies

_ALIGNMENT_BYTES = 64
_KINDS = ("parameters.", "buffers.")  # of a module's tensors, in their names (state/module_state.py)


class _StoredEntry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
    fresh = f"{path}.new"
    try:
        with open(fresh, "wb") as file:
            file.write(_lay_out(chosen))
            for number, part in enumerate(manifest.parts):
                _copy(file.fileno(), copies.data(name, part), number, chosen.values(), progress)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise
    return len(chosen)


def _find(copies: StoredCopies, name: str, manifest: Manifest) -> dict[str, _Tensor]:
    """Return all tensors of a copy, whole."""
    found: dict[str, _Tensor] = {}
    for number, part in enumerate(manifest.parts):
        for key, stored, offsets in _tensors_of(copies, name, part):
            count = math.prod(stored.shape)
            begin, end = stored.data_offsets
            tensor = found.setdefault(key, _Tensor(stored.dtype, (end - begin) // count if count else 0, stored.shape))
            if tensor.dtype != stored.dtype or len(tensor.shape) != len(offsets):
                raise DamagedCopyError(f"{key} differs between the parts of the copy")
            ends = (offset + size for offset, size in zip(offsets, stored.shape, strict=True))
            tensor.shape = tuple(map(max, zip(tensor.shape, ends, strict=True)))
            tensor.item_bytes = tensor.item_bytes or ((end - begin) // count if count else 0)
            tensor.shards[number] = _TensorShard(begin, offsets, stored.shape)
    for key, tensor in found.items():
        blocks = {(shard.offsets, shard.shape) for shard in tensor.shards.values()}
        if sum(math.prod(shape) for _, shape in blocks) != math.prod(tensor.shape):
            raise DamagedCopyError(f"shards of {key} are missing")
    return found


def _tensors_of(copies: StoredCopies, name: str, part: Part) -> Iterator[tuple[str, _StoredEntry, tuple[int, ...]]]:
    """Yield name, place in the part's data, and offsets of each tensor."""
    head = copies.header(name, part)
    try:
        raw = msgspec.json.decode(head[8:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA), type=dict[str, str])
        tied: dict[str, str] = msgspec.json.decode(metadata[OWN])["tied"]
        sharding: dict[str, Any] = msgspec.json.decode(metadata.get(SHARDING, "{}"))
        stored = {key: msgspec.json.decode(item, type=_StoredEntry) for key, item in raw.items()}
        for key, item in stored.items():
            offsets = sharding.get(key, {}).get("saved_offsets", [0] * len(item.shape))
            yield key, stored[tied.get(key, key)], tuple(map(int, offsets))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCopyError(f"{part.tensors.name}: the header is damaged: {error!r}") from None


def _chosen(tensors: dict[str, _Tensor], value: str | None) -> dict[str, _Tensor]:
    """Return the tensors to write, by their names in the output. Raises NothingToExportError."""
    chosen = {_name_in(key, value): tensor for key, tensor in tensors.items() if value is None or _is_of(key, value)}
    if not chosen:
        raise NothingToExportError(sorted({key.partition(".")[0] for key in tensors}))
    return chosen


def _is_of(key: str, value: str) -> bool:
    return key == value or key.startswith(f"{value}.")


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
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    for tensor in tensors.values():
        tensor.begin += 8 + len(text)
    return len(text).to_bytes(8, "little") + text


def _copy(
    fd: int, chunks: Iterable[bytes], part: int, tensors: Iterable[_Tensor], progress: Callable[[int], None]
) -> None:
    """Write the data of a part to the places of its tensors."""
    runs = sorted(run for tensor in tensors if part in tensor.shards for run in _runs(tensor, tensor.shards[part]))
    at = first = 0
    for chunk in chunks:
        end = at + len(chunk)
        for begin, target, size in runs[first:]:
            if begin >= end:
                break
            low, high = max(begin, at), min(begin + size, end)
            if low < high:
                _write(fd, memoryview(chunk)[low - at : high - at], target + low - begin)
        while first < len(runs) and runs[first][0] + runs[first][2] <= end:
            first += 1
        at = end
        progress(len(chunk))


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
