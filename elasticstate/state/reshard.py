"""Reshard: reads the parts that this worker needs out of copies that other workers have made of their parts.

Each needed region of a tensor is cut into the regions that the copies have, and their bytes go straight into the new
local tensors. No whole tensor is made. Regions that are not contiguous in their target, or lie on a device, pass
through a staging buffer of ``STAGING_BYTES``.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from elasticstate._native import copy_runs
from elasticstate.commits import Shard
from elasticstate.compat import dtensors
from elasticstate.compat.dtensors import Split
from elasticstate.core.ids import SlotId
from elasticstate.core.types import CopyOf, ShardSource, listed
from elasticstate.durable.parts import PartReader
from elasticstate.durable.stored_copies import DamagedCopyError, Manifest, StoredCopies
from elasticstate.errors import CollectiveError, CopyError, StateDivergedError, StateError
from elasticstate.log import logger
from elasticstate.state.layout import (
    ALIGNMENT_BYTES,
    Entry,
    Frame,
    Layout,
    c_strides,
    number_of,
    parse_header,
    round_up,
    torch_dtype,
)
from elasticstate.state.snapshot import Buffer, dtype_name, private_in
from elasticstate.state.values import Values

STAGING_BYTES = 64 << 20
"""Size of the buffer for regions that cannot be read directly into their target."""
RUN_BYTES = 8 << 10
"""One more range in a request costs about as much as these bytes."""


class Region(NamedTuple):
    """A region of a tensor: ``begin[d] <= index[d] < end[d]``."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def is_empty(self) -> bool:
        return any(end <= begin for begin, end in zip(self.begin, self.end, strict=True))

    def within(self, other: Region) -> Region:
        """Return the common part, which may be empty."""
        return Region(tuple(map(max, self.begin, other.begin)), tuple(map(min, self.end, other.end)))

    def without(self, other: Region) -> Iterator[Region]:
        """Yield disjoint regions that make up what is not in ``other``, a part of this region."""
        rest = self
        for d, (begin, end) in enumerate(zip(other.begin, other.end, strict=True)):
            if rest.begin[d] < begin:
                yield rest.cut(d, rest.begin[d], begin)
            if end < rest.end[d]:
                yield rest.cut(d, end, rest.end[d])
            rest = rest.cut(d, begin, end)

    def cut(self, d: int, begin: int, end: int) -> Region:
        """Return the part from ``begin`` to ``end`` of dimension ``d``."""
        return Region((*self.begin[:d], begin, *self.begin[d + 1 :]), (*self.end[:d], end, *self.end[d + 1 :]))

    def relative_to(self, origin: tuple[int, ...]) -> Region:
        return Region(
            tuple(at - start for at, start in zip(self.begin, origin, strict=True)),
            tuple(at - start for at, start in zip(self.end, origin, strict=True)),
        )

    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.begin, self.end))


def region_of(shard: Shard, sizes: Sequence[int]) -> Region:
    return Region(shard.offsets, tuple(offset + size for offset, size in zip(shard.offsets, sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class RegionRead:
    """A region to read. ``at`` is the region in the stored part, ``into`` that in the target."""

    offset: int  # of the stored part in the file
    stored: tuple[int, ...]  # sizes of the stored part
    at: Region
    target: torch.Tensor
    into: Region


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


def _outer_dimensions(item: RegionRead, sizes: tuple[int, ...]) -> int:
    """Return the number of dimensions over which a run does not extend that is contiguous in both tensors.

    ``sizes``: of the contiguous tensor that gets the bytes.
    """
    extent = item.at.sizes
    d = len(extent)
    while d > 1 and extent[d - 1] == item.stored[d - 1] == sizes[d - 1]:
        d -= 1
    return max(0, d - 1)


def runs(
    item: RegionRead, content: memoryview, sizes: tuple[int, ...], begin: tuple[int, ...]
) -> Iterator[tuple[int, memoryview]]:
    """Yield the contiguous runs of an item: (offset in the file, place in a contiguous tensor of ``sizes``).

    ``begin``: where the region begins in that tensor.
    """
    item_bytes = item.target.element_size()
    extent = item.at.sizes
    outer = _outer_dimensions(item, sizes)
    run = math.prod(extent[outer:]) * item_bytes
    from_strides, to_strides = ([item_bytes * stride for stride in c_strides(shape)] for shape in (item.stored, sizes))
    at = item.offset + sum(map(int.__mul__, item.at.begin, from_strides))
    to = sum(map(int.__mul__, begin, to_strides))
    for index in itertools.product(*map(range, extent[:outer])):
        here = to + sum(map(int.__mul__, index, to_strides))
        yield at + sum(map(int.__mul__, index, from_strides)), content[here : here + run]


def prefers_span(item: RegionRead) -> bool:
    """Return True if it is cheaper to read the rows of the stored part whole than to read each run of an item.

    False for a single run, which needs no staging buffer.
    """
    extent = item.at.sizes
    if len(extent) < 2:
        return False
    outer = _outer_dimensions(item, tuple(item.target.shape))
    needed, span = math.prod(extent) * item.target.element_size(), _span_bytes(item)
    return span // extent[0] <= STAGING_BYTES and span < needed + (math.prod(extent[:outer]) - 1) * RUN_BYTES


def _span_bytes(item: RegionRead) -> int:
    return item.at.sizes[0] * math.prod(item.stored[1:]) * item.target.element_size()


def staged_bytes(item: RegionRead) -> int:
    return _span_bytes(item) if prefers_span(item) else math.prod(item.at.sizes) * item.target.element_size()


def in_pieces(item: RegionRead) -> Iterator[RegionRead]:
    """Yield parts of an item that fit into the staging buffer: halves of its first long dimension, again and again."""
    if staged_bytes(item) <= STAGING_BYTES:
        yield item
        return
    d = next(d for d, size in enumerate(item.at.sizes) if size > 1)
    size = item.at.sizes[d]
    for begin, end in ((0, size // 2), (size // 2, size)):
        at, into = (part.cut(d, part.begin[d] + begin, part.begin[d] + end) for part in (item.at, item.into))
        yield from in_pieces(RegionRead(item.offset, item.stored, at, item.target, into))


def staged(
    item: RegionRead, staging: torch.Tensor, content: memoryview
) -> tuple[list[tuple[int, memoryview]], tuple[torch.Tensor, torch.Tensor]]:
    """Return the ranges to read into the staging buffer, and then the copy: (region of the target, its value)."""
    extent, dtype = item.at.sizes, item.target.dtype
    target = item.target.detach()[item.into.slices()]
    size = staged_bytes(item)
    if prefers_span(item):
        rows = staging[:size].view(dtype).view(extent[0], *item.stored[1:])
        at = item.offset + item.at.begin[0] * (size // extent[0])
        region = slice(None), *item.at.slices()[1:]
        return [(at, content[:size])], (target, rows[region])
    value = staging[:size].view(dtype).view(extent)
    return list(runs(item, content, extent, (0,) * len(extent))), (target, value)


class CopyReader(Protocol):
    """Access to the copies in the memory of all hosts. All methods raise CopyError if a copy is gone, or damaged.

    Where a copy is served, its checksum is compared with its seal before any of its bytes are sent, and the seal again
    after a copy that its owner may overwrite was read. So the content of a tensor need not be verified.
    """

    def header(self, copy: CopyOf) -> bytes:
        """Return all bytes before the random state."""

    def length(self, copy: CopyOf) -> int:
        """Return the size of the sealed content, in bytes."""

    def read(self, copy: CopyOf, offset: int, length: int) -> bytes:
        """Return bytes that are proven to come from this job: for what is unpickled."""

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read ranges: (offset in the file, where to put the bytes). After an error, these places are undefined."""

    def close(self) -> None:
        """Close all connections."""


class Piece(NamedTuple):
    """A tensor that this worker holds, and the place of its content in the whole tensor."""

    local: torch.Tensor
    shard: Shard


class ShardPlace(NamedTuple):
    """Place of a shard in a whole tensor. Replicas of a shard have the same."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def piece_of(name: str, value: torch.Tensor) -> Piece:
    """Return the local tensor of a value. The shard of a plain tensor is all of it.

    Raises StateError if a DTensor has a placement that cannot be described.
    """
    if not dtensors.is_dtensor(value):
        shape = tuple(value.shape)
        return Piece(value, Shard(shape, (0,) * len(shape)))
    dtensor: Any = value
    local, shape = dtensors.local_of(dtensor), tuple(dtensor.shape)
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    try:
        splits = dtensors.splits_of(dtensor)
        offsets, sizes = (
            chunk_of(shape, tuple(mesh.shape), tuple(coordinate), splits)
            if coordinate is not None
            else (shape, tuple(local.shape))
        )
        if coordinate is not None and sizes != tuple(local.shape):
            raise ValueError(f"its local tensor is {tuple(local.shape)}, and its placements require {sizes}")
    except ValueError as error:
        raise StateError(
            f"{name} is a DTensor that cannot be committed: {error}. Attach tensors whose placements are Shard and "
            "Replicate."
        ) from error
    return Piece(local, Shard(shape, offsets))


def chunk_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], splits: Sequence[Split]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the part that a DTensor has at one coordinate of its mesh, as ``torch.chunk`` cuts.

    ``shape``: of the whole tensor. ``splits``: one for each dimension of the mesh.

    The first dimensions of the mesh cut first, except strided ones, which cut after all others, and in reverse order:
    FSDP2 shards a tensor that tensor parallelism has sharded before. So each part is one region.

    Raises ValueError for strided placements in another arrangement.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    plain = [at for at, split in enumerate(splits) if split is not None and not split[1]]
    strided = [at for at, split in enumerate(splits) if split is not None and split[1]]
    for at in (*plain, *reversed(strided)):
        split = splits[at]
        assert split is not None
        dim, factor = split
        later = [mesh[j] for j in range(at + 1, len(splits)) if (other := splits[j]) is not None and other[0] == dim]
        if factor and factor != math.prod(later):
            raise ValueError(f"its placements {list(splits)} on a mesh of {mesh} are not those of FSDP2")
        step = -(-sizes[dim] // mesh[at])
        begin, end = (min(sizes[dim], step * i) for i in (coordinate[at], coordinate[at] + 1))
        offsets[dim], sizes[dim] = offsets[dim] + begin, end - begin
    return tuple(offsets), tuple(sizes)


def digest_of(pieces: Iterable[tuple[str, Piece]]) -> int:
    """Return the digest of the shards that a worker holds: 63 bits, never 0. Workers with equal ones are replicas."""
    forms = sorted(
        (name, piece.shard.shape, dtype_name(piece.local.dtype), piece.shard.offsets, tuple(piece.local.shape))
        for name, piece in pieces
    )
    return number_of(forms) or 1


RANGES = 4096  # of one request
MAX_NAMES = 5  # in an error

_Read = TypeVar("_Read")
_ENDLESS = 1 << 62  # size of a file whose end is not known: a buffer may be longer than its commit


@dataclass(frozen=True, slots=True)
class _Opened:
    """A copy whose header has been read."""

    copy: CopyOf
    frame: Frame
    length: int
    entries: dict[str, Entry]


class CommitCopies:
    """Copies of one commit: all parts of its attached values, and its plain values.

    Args:
        reader: access to the copies.
        sources: the copies, in the order in which to try them. Those of a digest contain the same shards.
        own: this worker's own commit, if it is one of the sources.
    """

    def __init__(self, reader: CopyReader, sources: Sequence[ShardSource], own: _OwnCommit | None = None) -> None:
        self._reader, self._own = reader, own
        self._left: dict[int, list[CopyOf]] = {}  # by digest: copies that were not tried
        for source in sources:
            self._left.setdefault(source.digest, []).append(source.copy)
        self._digests = list(self._left)
        self._open: dict[int, _Opened] = {}
        self._failures: list[tuple[CopyOf, str]] = []

    def __enter__(self) -> CommitCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    # --------------------------------------------------------------------------------------------- what the copies have

    def tie(self, name: str) -> object:
        """Return what names of one tensor have in common, in the first copy with this one; None for an empty tensor."""
        found = next(self._entries(name), None)
        if found is None or not found[1].size_bytes:
            return None
        opened, entry = found  # another copy may have another tensor at the same place
        return opened.copy, entry.offset, entry.dtype, entry.shape, entry.strides

    def find(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a whole tensor. Raises StateError if no copy has it."""
        if (found := next(self._entries(name), None)) is not None:
            dtype = torch_dtype(found[1].dtype)
            assert dtype is not None, "attached values are tensors of torch"
            return found[0].frame.sharding.shards[name].shape, dtype
        self._raise_if_unreadable({name: []})
        raise StateError(
            f"The commit has no {name}. Attach the same objects as the worker that committed, under the same names."
        )

    def _entries(self, name: str) -> Iterator[tuple[_Opened, Entry]]:
        return ((opened, opened.entries[name]) for opened in self._each() if name in opened.entries)

    def places(self) -> set[ShardPlace]:
        """Return the places of all parts that are not empty, of replicas once. Raises CollectiveError."""
        opened = list(self._each())
        if len(opened) < len(self._digests):
            self._raise_if_unreadable({"all parts": []})
        return {
            ShardPlace(entry.name, shards[entry.name].shape, shards[entry.name].offsets, entry.shape)
            for one in opened
            for shards in (one.frame.sharding.shards,)
            for entry in one.frame.layout.entries
            if entry.name in shards and entry.size_bytes
        }

    def trees(self) -> dict[str, Any]:
        """Return the attached values of the commit without their tensors."""
        for opened in self._each_until_read():
            if (with_objects := self._tried(opened, self._objects)) is not None:
                return {name: with_objects[name] for name in opened.frame.sharding.names}
        self._raise_if_unreadable({"the attached values": []})
        raise StateError("The commit has no attached values. Attach values before the first commit of each world.")

    def plain(self) -> tuple[Values, bytes]:
        """Return the plain values of a copy, and the random state of its worker."""
        for opened in self._each_until_read():
            if (found := self._tried(opened, self._plain)) is not None:
                return found
        self._raise_if_unreadable({"the plain values": []})
        raise CollectiveError("there is no copy of the commit from which this world starts")

    def _plain(self, opened: _Opened) -> tuple[Values, bytes]:
        frame = opened.frame
        entries, places, end = [], {}, 0
        for entry in frame.layout.entries:
            if entry.name in frame.sharding.shards:
                continue
            if entry.offset not in places:
                places[entry.offset] = end
                end = round_up(end + entry.size_bytes, ALIGNMENT_BYTES)
            entries.append(msgspec.structs.replace(entry, offset=places[entry.offset]))
        memory = torch.empty(end, dtype=torch.uint8, device="cpu")
        content = memory.numpy().data
        sizes = {entry.offset: entry.size_bytes for entry in entries}
        ranges = [(frame.tensors + at, content[to : to + sizes[to]]) for at, to in places.items() if sizes[to]]
        self._read(opened, ranges)
        random = self._reader_of(opened.copy).read(opened.copy, frame.random, frame.tensors - frame.random)
        place = Frame(Layout(entries, end), 0, 0, end, frame.sharding)
        return Values(memory, place, self._objects(opened), {}), private_in(random)

    def _objects(self, opened: _Opened) -> dict[str, Any]:
        begin = opened.frame.objects
        content = self._reader_of(opened.copy).read(opened.copy, begin, opened.length - begin)
        found: dict[str, Any] = pickle.loads(content)
        return found

    # ---------------------------------------------------------------------------------------------- copies and failures

    def _each(self) -> Iterator[_Opened]:
        """Yield one copy of each digest, except where none can be read. Headers are read when they are needed."""
        for wanted in self._digests:
            opened = self._opened(wanted)
            if opened is not None:
                yield opened

    def _each_until_read(self) -> Iterator[_Opened]:
        """Yield copies until the caller has read from one: one of each digest, then the next after each failure."""
        for wanted in self._digests:
            while (opened := self._opened(wanted)) is not None:
                yield opened
                if self._open.get(wanted) is opened:
                    break  # it can be read, and the caller wants another digest

    def _opened(self, digest: int) -> _Opened | None:
        while digest not in self._open and self._left[digest]:
            copy = self._left[digest].pop(0)
            try:
                self._open[digest] = self._parsed(copy)
            except (CopyError, ValueError) as error:
                self._failed(copy, error)
        return self._open.get(digest)

    def _reader_of(self, copy: CopyOf) -> CopyReader | _OwnCommit:
        return self._own if self._own is not None and copy.slot == _HERE else self._reader

    def _parsed(self, copy: CopyOf) -> _Opened:
        frame, _ = parse_header(self._reader_of(copy).header(copy), _ENDLESS)
        length = self._reader_of(copy).length(copy)
        if length < frame.objects:
            raise ValueError(f"the copy has {length} bytes, and its header requires more")
        return _Opened(copy, frame, length, {entry.name: entry for entry in frame.layout.entries})

    def _tried(self, opened: _Opened, read: Callable[[_Opened], _Read]) -> _Read | None:
        """Return what ``read`` returns; None if the copy cannot be read. Then it is not used again."""
        try:
            return read(opened)
        except CopyError as error:
            self._failed(opened.copy, error)
            self._open = {digest: other for digest, other in self._open.items() if other is not opened}
            return None

    def _failed(self, copy: CopyOf, error: Exception) -> None:
        text = str(error)  # a record of a log must not keep the error, with all objects of its frames
        logger.warning("commit %s of slot %s cannot be read on host %s: %s", copy.commit, copy.slot, copy.host, text)
        self._failures.append((copy, text))

    def _raise_if_unreadable(self, missing: Mapping[str, Sequence[Region]]) -> None:
        """Raise CollectiveError if copies could not be read: the next world has others."""
        if not self._failures:
            return
        more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
        hosts = [f"{copy.host} (slot {copy.slot}: {error})" for copy, error in self._failures]
        raise CollectiveError(
            f"parts of attached values cannot be read: {_described(missing)}{more}. Their copies are on {listed(hosts)}"
        )

    # ---------------------------------------------------------------------------------------------------- reading parts

    def load(self, targets: Mapping[str, Piece], when_opened: Callable[[], object] | None = None) -> None:
        """Read the content of all local tensors.

        ``when_opened``: is called when each needed copy has been opened, so that its checksum is correct.

        Raises:
            StateError: a tensor has another shape or dtype in the commit, or is not in it. Nothing has been written.
            CollectiveError: parts cannot be read from any copy. The targets are undefined then.
        """
        for name, piece in targets.items():
            shape, dtype = self.find(name)
            if (shape, dtype) != (piece.shard.shape, piece.local.dtype):
                raise StateError(
                    f"{name} is {piece.shard.shape} of {piece.local.dtype}, in the commit {shape} of {dtype}. Attach "
                    "the same objects as the worker that committed."
                )
        missing = {name: [region_of(piece.shard, piece.local.shape)] for name, piece in targets.items()}
        missing = {name: regions for name, regions in missing.items() if not regions[0].is_empty}
        if when_opened is not None:
            self._open_all(targets, missing)
            when_opened()
        copies = self._each_until_read()
        while missing and (opened := next(copies, None)) is not None:
            items, left = _cut(opened, targets, missing)
            if not items or self._tried(opened, functools.partial(self._transfer, items)) is not None:
                missing = left
        if missing:
            self._raise_if_unreadable(missing)
            raise StateError(f"The copies of the commit do not contain {_described(missing)}.")

    def _open_all(self, targets: Mapping[str, Piece], missing: Mapping[str, list[Region]]) -> None:
        """Open the copies that ``load`` reads. Raises CollectiveError if one is needed that cannot be read."""
        left: Mapping[str, list[Region]] = missing
        copies = self._each()
        while left and (opened := next(copies, None)) is not None:
            _, left = _cut(opened, targets, left)
        if left:
            self._raise_if_unreadable(left)

    def _transfer(self, items: Sequence[RegionRead], opened: _Opened) -> bool:
        """Read items into their targets. Return True. Raises CopyError."""
        ranges: list[tuple[int, memoryview]] = []
        through: list[RegionRead] = []
        for item in items:
            if item.target.is_cpu and item.target.is_contiguous() and not prefers_span(item):
                ranges += runs(item, bytes_of(item.target), tuple(item.target.shape), item.into.begin)
            else:
                through += in_pieces(item)
        self._read(opened, ranges)
        if through:
            self._stage(opened, through)
        return True

    def _stage(self, opened: _Opened, items: Sequence[RegionRead]) -> None:
        """Read items into a staging buffer, as many at once as it has place for, and copy them into their targets."""
        sizes = [round_up(staged_bytes(item), ALIGNMENT_BYTES) for item in items]
        staging = torch.empty(min(max(STAGING_BYTES, max(sizes)), sum(sizes)), dtype=torch.uint8, device="cpu")
        content = staging.numpy().data
        left = deque(zip(items, sizes, strict=True))
        while left:
            ranges: list[tuple[int, memoryview]] = []
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            used = 0
            while left and used + left[0][1] <= staging.numel():
                item, size = left.popleft()
                more, copy = staged(item, staging[used : used + size], content[used : used + size])
                ranges += more
                copies.append(copy)
                used += size
            self._read(opened, ranges)
            with torch.no_grad():
                for target, value in copies:
                    target.copy_(value)

    def _read(self, opened: _Opened, ranges: list[tuple[int, memoryview]]) -> None:
        ranges.sort(key=lambda pair: pair[0])
        for begin in range(0, len(ranges), RANGES):
            self._reader_of(opened.copy).read_into(opened.copy, ranges[begin : begin + RANGES])


def _cut(
    opened: _Opened, targets: Mapping[str, Piece], missing: Mapping[str, Sequence[Region]]
) -> tuple[list[RegionRead], dict[str, list[Region]]]:
    """Return the regions to read from a copy, and what is missing then."""
    items: list[RegionRead] = []
    left: dict[str, list[Region]] = {}
    for name, regions in missing.items():
        entry = opened.entries.get(name)
        shard = opened.frame.sharding.shards.get(name)
        if entry is None or shard is None or not entry.size_bytes:
            left[name] = list(regions)
            continue
        stored = region_of(shard, entry.shape)
        piece = targets[name]
        rest: list[Region] = []
        for region in regions:
            common = region.within(stored)
            if common.is_empty:
                rest.append(region)
                continue
            rest += region.without(common)
            at, into = common.relative_to(shard.offsets), common.relative_to(piece.shard.offsets)
            items.append(RegionRead(opened.frame.tensors + entry.offset, entry.shape, at, piece.local, into))
        if rest:
            left[name] = rest
    return items, left


def _described(missing: Mapping[str, Sequence[Region]]) -> str:
    """Return the first names with their regions, as text."""
    return listed(
        name + ", ".join(f"[{', '.join(f'{a}:{b}' for a, b in zip(*region, strict=True))}]" for region in regions)
        for name, regions in itertools.islice(missing.items(), MAX_NAMES)
    )


_ELEMENTS = 1 << 20  # that are summed at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-7046029254386353131, -4417276706812531889, 1609587929392839161)  # odd numbers: those of XXH64
_MASK = (1 << 64) - 1

_Measured = tuple[ShardPlace, int]
"""A part of a tensor, and the sum of its content."""


def check_reshard(
    copies: CommitCopies, pieces: Mapping[str, Piece], rank: int, size: int, exchange: Callable[[bytes], list[bytes]]
) -> None:
    """Compare the tensors of all ranks with those of the commit, for ``--verify-sync``. All ranks of the world call it.

    Each tensor gets a sum over its elements, of a mix of the element's bits with its position in the whole tensor. The
    sum does not depend on how the tensor is cut, so the parts of the commit and those of this world have the same one.
    The parts of the commit are divided among the ranks, which read them once more. No rank makes a tensor whole.

    Args:
        pieces: the tensors of this rank by name, after the reshard.
        exchange: sends a message to all ranks, and returns the messages of all of them.

    Raises:
        StateDivergedError: tensors differ. All ranks raise it, with the same message.
        CollectiveError: parts of the commit cannot be read from any copy.
    """
    live = [
        (ShardPlace(name, piece.shard.shape, piece.shard.offsets, tuple(piece.local.shape)), content_sum(piece))
        for name, piece in pieces.items()
        if piece.local.numel()
    ]
    stored = [_read(copies, place) for place in sorted(copies.places())[rank::size]]
    messages = exchange(msgspec.msgpack.encode((live, stored)))
    everyone = [msgspec.msgpack.decode(message, type=tuple[list[_Measured], list[_Measured]]) for message in messages]
    present = _contents(part for parts, _ in everyone for part in parts)
    committed = _contents(part for _, parts in everyone for part in parts)
    wrong = sorted(name for name, content in present.items() if committed.get(name, content) != content)
    if wrong:
        more = f" and {len(wrong) - MAX_NAMES} more" if len(wrong) > MAX_NAMES else ""
        raise StateDivergedError(
            f"--verify-sync: after the reshard, attached values are not those of the commit: "
            f"{listed(wrong[:MAX_NAMES])}{more}. Report this as a bug, with the shapes and placements of these tensors."
        )


def _read(copies: CommitCopies, place: ShardPlace) -> _Measured:
    _, dtype = copies.find(place.name)
    piece = Piece(torch.empty(place.sizes, dtype=dtype, device="cpu"), Shard(place.shape, place.offsets))
    copies.load({place.name: piece})
    return place, content_sum(piece)


def _contents(parts: Iterable[_Measured]) -> dict[str, list[int]]:
    """Return the sum of each tensor; for replicas that differ all of their sums, which equal those of no tensor.

    A tensor whose parts overlap without being replicas is left out: ranks of different meshes hold it.
    """
    of_name: dict[str, dict[ShardPlace, set[int]]] = {}
    for place, content in parts:
        of_name.setdefault(place.name, {}).setdefault(place, set()).add(content)
    found: dict[str, list[int]] = {}
    for name, sums in of_name.items():
        if differing := [content for contents in sums.values() if len(contents) > 1 for content in contents]:
            found[name] = sorted(differing)
        elif sum(math.prod(place.sizes) for place in sums) == math.prod(next(iter(sums)).shape):
            found[name] = [sum(map(min, sums.values())) & _MASK]
    return found


def content_sum(piece: Piece) -> int:
    """Return the sum over the elements of a part: 64 bits, the same for each division of a tensor into parts."""
    local, shape, offsets = piece.local.detach(), piece.shard.shape, piece.shard.offsets
    if local.is_complex():
        local, shape, offsets = torch.view_as_real(local), (*shape, 2), (*offsets, 0)
    if not local.dim():
        local, shape, offsets = local.reshape(1), (1,), (0,)
    rows = max(1, _ELEMENTS // max(1, math.prod(local.shape[1:])))
    total = 0
    for begin in range(0, local.shape[0], rows):
        block = local[begin : begin + rows].cpu().contiguous()
        bits = block.view(_BITS[block.element_size()]).to(torch.int64)
        mixed = bits * _MIX[0] + _positions(block.shape, shape, (offsets[0] + begin, *offsets[1:])) * _MIX[1]
        mixed ^= mixed >> 29
        mixed *= _MIX[2]
        mixed ^= mixed >> 32
        total += int(mixed.sum())
    return total & _MASK


def _positions(sizes: Iterable[int], shape: tuple[int, ...], offsets: tuple[int, ...]) -> torch.Tensor:
    """Return the index of each element of a block in the flattened whole tensor."""
    found = torch.zeros((), dtype=torch.int64, device="cpu")
    for d, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        found = found.unsqueeze(-1) + (torch.arange(size, device="cpu") + offset) * math.prod(shape[d + 1 :])
    return found


_HERE = SlotId("this worker", 0)


def copies_with_own(
    reader: CopyReader, sources: Sequence[ShardSource], own: Buffer | None, worker_key: str
) -> CommitCopies:
    """Return the copies of the line, with the ``own`` commit before others that have the same shards.

    ``own``: the buffer of this worker that holds the line, if there is one. ``worker_key``: see Session.
    """
    slot = worker_key.rpartition("#")[0]
    digest = next((source.digest for source in sources if str(source.copy.slot) == slot), None)
    if own is None or own.commit is None or digest is None:
        return CommitCopies(reader, sources)
    here = ShardSource(digest, CopyOf("this worker", _HERE, own.commit))
    return CommitCopies(reader, [here, *sources], _OwnCommit(own))


class _OwnCommit:
    """Reader of the own commit (see CopyReader). Its buffer does not change: this worker alone writes to it."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def header(self, _: CopyOf) -> bytes:
        if not self._buffer.is_intact():
            raise CopyError("its checksum is wrong")
        return self._buffer.memory[: self._buffer.frame.random].numpy().tobytes()

    def length(self, _: CopyOf) -> int:
        return self._buffer.length

    def read(self, _: CopyOf, offset: int, length: int) -> bytes:
        return self._buffer.memory[offset : offset + length].numpy().tobytes()

    def read_into(self, _: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        copy_ranges(self._buffer.memory, ranges)


class StoredParts:
    """Reader of the parts of a copy (see CopyReader). Part n counts as slot n of the host ``name``."""

    def __init__(self, copies: StoredCopies, name: str, manifest: Manifest) -> None:
        self.name, self.manifest = name, manifest
        self._copies = copies
        self._readers = [PartReader(copies, name, part) for part in manifest.parts]

    def verify(self, rank: int, size: int) -> None:
        """Read and verify this rank's share of the copy: a number of blocks, and some parts' other files.

        Raises DamagedCopyError, FileNotFoundError, and errors of the storage.
        """
        parts = self.manifest.parts
        for part, reader in list(zip(parts, self._readers, strict=True))[rank::size]:
            frame_of(reader.head, part.data_bytes)
            self._copies.file(self.name, part.objects)
        blocks = [(part, block) for part in parts for block in range(len(part.blocks_crc32c))]
        own = blocks[rank * len(blocks) // size : (rank + 1) * len(blocks) // size]
        for part in parts:
            wanted = [block for of, block in own if of is part]
            for _ in self._copies.blocks(self.name, part, wanted) if wanted else ():
                pass

    def commit_copies(self, rank: int) -> CommitCopies:
        """Return the copies of the commit. Each rank tries another part first for what all parts have."""
        sources = [
            ShardSource(part.digest, CopyOf(self.name, SlotId("part", number), self.manifest.commit))
            for number, part in enumerate(self.manifest.parts)
        ]
        first = rank % len(sources)
        return CommitCopies(self, [*sources[first:], *sources[:first]])

    def header(self, copy: CopyOf) -> bytes:
        with _errors_of_copies():
            return self._reader(copy).head

    def length(self, copy: CopyOf) -> int:
        return self._reader(copy).length

    def read(self, copy: CopyOf, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_into(copy, [(offset, memoryview(data))])
        return bytes(data)

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        with _errors_of_copies():
            self._reader(copy).read_into([(offset, place.cast("B")) for offset, place in ranges])

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def _reader(self, copy: CopyOf) -> PartReader:
        return self._readers[copy.slot.slot]


@contextmanager
def _errors_of_copies() -> Iterator[None]:
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:  # of the copy, of the storage, or of its library
        raise CopyError(f"{type(error).__name__}: {error}") from error


def frame_of(head: bytes, data_bytes: int) -> Frame:
    """Return the layout of the commit in a part. Raises DamagedCopyError."""
    try:
        frame, _ = parse_header(memoryview(head), _ENDLESS)
    except ValueError as error:
        raise DamagedCopyError(f"the header is invalid: {error}") from None
    if (frame.tensors, frame.objects - frame.tensors) != (len(head), data_bytes):
        raise DamagedCopyError("the header does not describe the files")
    return frame
