"""Layout of a commit in its buffer: a safetensors file that fills the buffer.

::

    | u64 n | JSON, n bytes | random state | tensors, largest items first | objects: one pickle | unused, old bytes  |
    0                       64-byte aligned                                                     seal's length       end

The format (https://github.com/huggingface/safetensors) requires tensors without holes, from the end of the header to
the end of the file. So tensors are sorted by alignment. The last tensor is a pickle, which contains its own end marker,
and it extends to the end of the buffer. The metadata describes what the format does not support (tied tensors, strides,
numpy's strings, complex128).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from elasticstate.commits import (
    METADATA,
    NO_SHARDING,
    OBJECTS,
    RANDOM,
    VERSION,
    Metadata,
    Notes,
    Shard,
    Sharding,
    Stored,
    decode,
    header_digest,
    sharding_info,
)
from elasticstate.errors import StateError

Checksums = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""CRC-32C of each value of a commit, in the order of their bytes."""

ALIGNMENT_BYTES = 64
HEADER_GRANULE_BYTES = 4096
MAX_DIMENSIONS = 64

# torch dtypes that the format knows: (its name, what is added to the shape)
_KNOWN: dict[torch.dtype, tuple[str, tuple[int, ...]]] = {
    torch.bool: ("BOOL", ()),
    torch.uint8: ("U8", ()),
    torch.int8: ("I8", ()),
    torch.uint16: ("U16", ()),
    torch.int16: ("I16", ()),
    torch.uint32: ("U32", ()),
    torch.int32: ("I32", ()),
    torch.uint64: ("U64", ()),
    torch.int64: ("I64", ()),
    torch.float8_e4m3fn: ("F8_E4M3", ()),
    torch.float8_e4m3fnuz: ("F8_E4M3FNUZ", ()),
    torch.float8_e5m2: ("F8_E5M2", ()),
    torch.float8_e5m2fnuz: ("F8_E5M2FNUZ", ()),
    torch.float16: ("F16", ()),
    torch.bfloat16: ("BF16", ()),
    torch.float32: ("F32", ()),
    torch.float64: ("F64", ()),
    torch.complex32: ("F16", (2,)),
    torch.complex64: ("C64", ()),
    torch.complex128: ("F64", (2,)),
}
_TORCH_OF = {name: dtype for dtype, (name, more) in _KNOWN.items() if not more}
_INTEGERS = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
_OF_NUMPY = ["bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]
_NUMPY_AS = {np.dtype(name).newbyteorder("<").str: _KNOWN[getattr(torch, name)] for name in _OF_NUMPY}


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One tensor or array, in C order. ``dtype``: ``"torch.float32"``, or numpy's ``"<f4"``.

    ``offset`` counts from the beginning of the tensors, in bytes. Tied tensors have separate entries and share the
    bytes. ``strides``: of what was captured, in elements, if they are others than those of C order and there were no
    holes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    strides: tuple[int, ...] = ()


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """Places of all tensors of a commit, in the order in which they were captured."""

    entries: list[Entry]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """Offsets of a commit's parts in its buffer, in bytes."""

    layout: Layout
    random: int
    tensors: int
    objects: int
    sharding: Sharding = NO_SHARDING


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype that prints as ``name``; None for a numpy name. Raises StateError if torch has no such dtype."""
    if not name.startswith("torch."):
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or str(found) != name:
        raise StateError(f"torch {torch.__version__} has no dtype {name}. Install the version of torch that committed.")
    return found


def alignment_of(dtype: str) -> int:
    """Return a power of two that divides the size of an item, in bytes."""
    kind = torch_dtype(dtype)
    return kind.itemsize if kind is not None else np.dtype(dtype).alignment


def unusual_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides if they are others than those of C order, and the elements fill their memory; else ()."""
    if strides == c_strides(shape):
        return ()
    end = 1
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] != 1):
        if stride != end:
            return ()
        end *= size
    return strides


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of C order, in elements, as torch counts them."""
    found = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        found[d - 1] = found[d] * max(shape[d], 1)
    return tuple(found)


def lay_out(described: list[tuple[str, str, tuple[int, ...], int, tuple[int, ...], object]]) -> Layout:
    """Give each of (name, dtype, shape, bytes, strides, key) a place. Values with the same key are tied.

    The values with the largest items come first: then all are aligned, without holes.
    """
    first: dict[object, int] = {}
    source = [first.setdefault(key, i) for i, (*_, key) in enumerate(described)]
    alignments = {dtype: alignment_of(dtype) for dtype in {dtype for _, dtype, *_ in described}}
    end = 0
    offsets: dict[int, int] = {}
    for i in sorted(first.values(), key=lambda i: -alignments[described[i][1]]):
        offsets[i] = end
        end += described[i][3]
    entries = [
        Entry(name, dtype, shape, offsets[at], size, strides)
        for (name, dtype, shape, size, strides, _), at in zip(described, source, strict=True)
    ]
    return Layout(entries, end)


def view(memory: torch.Tensor, entry: Entry, begin: int) -> Any:
    """Return the tensor or array at an entry, without a copy. ``begin``: offset of the tensors in ``memory``."""
    flat = memory[begin + entry.offset : begin + entry.offset + entry.size_bytes]
    dtype = torch_dtype(entry.dtype)
    if dtype is not None:
        return flat.view(dtype).view(entry.shape)
    return np.ndarray(entry.shape, np.dtype(entry.dtype), flat.numpy())


class Header:
    """Header of a layout. Everything except the size of its last part is computed once."""

    def __init__(self, layout: Layout, random_bytes: int, sharding: Sharding = NO_SHARDING) -> None:
        self.layout = layout
        self._start, self._body = _encode(layout, random_bytes, sharding)
        longest = len(self._body) + len(self._last(1 << 62)) + 8
        # After small changes, the other parts stay in place.
        capacity = round_up(longest + longest // 32 + 512, HEADER_GRANULE_BYTES)
        tensors = capacity + random_bytes
        self.frame = Frame(layout, capacity, tensors, tensors + layout.size_bytes, sharding)

    def encode(self, buffer_bytes: int) -> bytes:
        """Return all bytes before the data, for a buffer of ``buffer_bytes`` bytes."""
        text = self._body + self._last(buffer_bytes - self.frame.random)
        capacity = self.frame.random - 8
        return capacity.to_bytes(8, "little") + text.ljust(capacity)

    def _last(self, end: int) -> bytes:
        stored = Stored("U8", (end - self._start,), (self._start, end))
        return b"," + msgspec.json.encode({OBJECTS: stored})[1:]


def _encode(layout: Layout, random_bytes: int, sharding: Sharding) -> tuple[int, bytes]:
    """Return the offset of the objects, and the header up to them."""
    stored: dict[str, Stored] = {RANDOM: Stored("U8", (random_bytes,), (0, random_bytes))}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[int, int, str, tuple[int, ...]], str] = {}
    for entry in layout.entries:
        if entry.name in (RANDOM, OBJECTS, METADATA):
            raise StateError(f"state.{entry.name} cannot be committed under this name. Choose another name.")
        key = (entry.offset, entry.size_bytes, entry.dtype, entry.shape)
        owner = owners.setdefault(key, entry.name) if entry.size_bytes else entry.name
        if owner != entry.name:
            tied[entry.name] = owner
            continue
        name, shape, is_complete = _stored_as(entry)
        if not is_complete:
            kinds[entry.name] = (entry.dtype, entry.shape)
        start = random_bytes + entry.offset
        stored[entry.name] = Stored(name, shape, (start, start + entry.size_bytes))
    names = [entry.name for entry in layout.entries]
    in_order = [name for name in stored if name != RANDOM] == names
    strides = {entry.name: entry.strides for entry in layout.entries if entry.strides}
    notes = Notes(VERSION, kinds, tied, None if in_order else names, sharding, strides)
    info = sharding_info(stored, (RANDOM, OBJECTS), sharding) if sharding.names else ""
    metadata = Metadata("pt", msgspec.json.encode(notes).decode(), info)
    text = msgspec.json.encode({METADATA: metadata, **stored})
    return random_bytes + layout.size_bytes, text[:-1]


def _stored_as(entry: Entry) -> tuple[str, tuple[int, ...], bool]:
    """Return the format's dtype and shape for an entry, and True if they describe the entry completely."""
    dtype = torch_dtype(entry.dtype)
    known = _KNOWN.get(dtype) if dtype is not None else _NUMPY_AS.get(entry.dtype)
    if known is None:
        return "U8", (entry.size_bytes,), False
    name, more = known
    return name, entry.shape + more, dtype is not None and not more


def number_of(value: object) -> int:
    """Return a 63-bit hash of a value."""
    return header_digest(msgspec.msgpack.encode(value)) >> 1


def parse_header(content: bytes | memoryview, size_bytes: int) -> tuple[Frame, int]:
    """Parse and validate the header of a file of ``size_bytes`` bytes of which ``content`` is the beginning.

    Return the places of its parts, and the digest of the header. The content is not trusted. Raises ValueError, or
    StateError for a dtype unknown to torch.
    """
    _require(len(content) > 8, "the buffer has no header")
    capacity = int.from_bytes(content[:8], "little")
    _require(2 <= capacity <= len(content) - 8, "the header is longer than the buffer")
    header = content[: 8 + capacity]
    _, notes, stored = decode(header)
    return _frame(stored, notes, 8 + capacity, size_bytes), header_digest(header)


def _frame(stored: dict[str, Stored], notes: Notes, begin: int, size: int) -> Frame:
    random, objects = stored.pop(RANDOM, None), stored.pop(OBJECTS, None)
    if random is None or objects is None:
        raise ValueError("the header lacks the random state or the objects")
    last, end = objects.data_offsets
    _require(begin % ALIGNMENT_BYTES == 0, "the random state is not aligned")
    _require(random.data_offsets[0] == 0, "the random state is not the first part")
    # The file may be longer than the header states: the agent may have enlarged it after the header was written.
    _require(8 <= random.data_offsets[1] <= last <= end <= size - begin, "the parts are not in order")
    _require(random.data_offsets[1] % ALIGNMENT_BYTES == 0, "the tensors are not aligned")
    tensors_bytes = last - random.data_offsets[1]
    entries = {name: _entry(name, item, notes, random.data_offsets[1]) for name, item in stored.items()}
    places = sorted((entry.offset, entry.offset + entry.size_bytes) for entry in entries.values())
    ends, starts = [0, *(end for _, end in places)], [*(start for start, _ in places), tensors_bytes]
    _require(ends == starts, "holes between tensors")
    for name, owner in notes.tied.items():
        _require(name not in entries and owner in stored, f"{name} is tied to a tensor that does not exist")
        found = entries[owner]
        entries[name] = Entry(name, found.dtype, found.shape, found.offset, found.size_bytes)
    for name, strides in notes.strides.items():
        _require(name in entries, f"{name} has strides and does not exist")
        is_valid = len(strides) == len(entries[name].shape) and bool(unusual_strides(entries[name].shape, strides))
        _require(is_valid, f"{name} has invalid strides")
        entries[name] = msgspec.structs.replace(entries[name], strides=strides)
    names = list(stored) if notes.order is None else notes.order
    _require(len(names) == len(entries) and entries.keys() == set(names), "the order does not contain all names")
    layout = Layout([entries[name] for name in names], tensors_bytes)
    for name, shard in notes.sharding.shards.items():
        _require(name in entries, f"{name} is the shard of a tensor that does not exist")
        _check_shard(entries[name], shard)
    return Frame(layout, begin, begin + random.data_offsets[1], begin + last, notes.sharding)


def _check_shard(entry: Entry, shard: Shard) -> None:
    is_inside = len(shard.shape) == len(shard.offsets) == len(entry.shape) and all(
        0 <= offset <= offset + size <= whole
        for offset, size, whole in zip(shard.offsets, entry.shape, shard.shape, strict=True)
    )
    _require(is_inside, f"{entry.name} is not within its whole tensor")


def _entry(name: str, stored: Stored, notes: Notes, random_bytes: int) -> Entry:
    start, end = stored.data_offsets
    _require(random_bytes <= start <= end, f"{name} is out of bounds")
    if name in notes.kinds:
        dtype, shape = notes.kinds[name]
    else:
        _require(stored.dtype in _TORCH_OF, f"{name} has an unknown dtype")
        dtype, shape = str(_TORCH_OF[stored.dtype]), stored.shape
    check_sizes(name, dtype, shape, end - start)
    _require((start - random_bytes) % alignment_of(dtype) == 0, f"{name} is not aligned")
    entry = Entry(name, dtype, shape, start - random_bytes, end - start)
    _require(_stored_as(entry)[:2] == (stored.dtype, stored.shape), f"{name} has two different dtypes or shapes")
    return entry


def check_sizes(name: str, dtype: str, shape: tuple[int, ...], size_bytes: int) -> None:
    """Raise ValueError unless dtype and shape are valid, and such a tensor or array has ``size_bytes`` bytes."""
    kind = torch_dtype(dtype)
    if kind is None:
        try:
            found = np.dtype(dtype)
        except (TypeError, SyntaxError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
        _require(found.str == dtype and found.kind in "biufcSUmM", f"{name} has an unsupported dtype")
        item = found.itemsize
    else:
        item = kind.itemsize
    _require(len(shape) <= MAX_DIMENSIONS and all(0 <= n < 1 << 62 for n in shape), f"{name} has an invalid shape")
    _require(math.prod(shape) * item == size_bytes, f"{name} has a size that does not match its shape")


def _require(condition: bool, error: str) -> None:
    if not condition:
        raise ValueError(error)
