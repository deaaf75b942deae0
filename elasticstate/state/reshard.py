"""Reshard: reads the parts that this worker needs out of copies that other workers have made of their parts.

The parts of a new world rarely are those of the old one. Each needed block is cut into the blocks that the copies have,
and their bytes go straight into the new local tensors. No whole tensor is made. Blocks that are not contiguous in their
target, or lie on a device, pass through a staging buffer of ``STAGING_BYTES``.

The copy reader verifies bytes: where a copy is served, its checksum was compared with the seal.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from elasticstate.core.texts import listed
from elasticstate.core.types import CopyOf, ShardSource
from elasticstate.errors import CollectiveError, CopyError, StateError
from elasticstate.log import logger
from elasticstate.state.blocks import (
    STAGING_BYTES,
    BlockRead,
    Box,
    box_of,
    bytes_of,
    in_pieces,
    prefers_span,
    runs,
    staged,
    staged_bytes,
)
from elasticstate.state.buffer import LENGTH_BYTES
from elasticstate.state.layout import ALIGNMENT_BYTES, Entry, Frame, Layout, parse_header, round_up, torch_dtype
from elasticstate.state.shards import CopyReader, PartPlace, Piece
from elasticstate.state.values import Values

RANGES = 4096  # of one request
MAX_NAMES = 5  # in an error

_Read = TypeVar("_Read")
_ENDLESS = 1 << 62  # size of a file whose end is not known


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
    """

    def __init__(self, reader: CopyReader, sources: Sequence[ShardSource]) -> None:
        self._reader = reader
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

    def find(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a whole tensor. Raises StateError if no copy has it."""
        for opened in self._each():
            entry = opened.entries.get(name)
            if entry is not None:
                dtype = torch_dtype(entry.dtype)
                assert dtype is not None, "attached values are tensors of torch"
                return opened.frame.sharding.shards[name].shape, dtype
        self._raise_if_unreadable({name: []})
        raise StateError(
            f"The commit has no {name}. Attach the same objects as the worker that committed, under the same names."
        )

    def places(self) -> set[PartPlace]:
        """Return the places of all parts that are not empty, of replicas once. Raises CollectiveError."""
        opened = list(self._each())
        if len(opened) < len(self._digests):
            self._raise_if_unreadable({"all parts": []})
        return {
            PartPlace(entry.name, shards[entry.name].shape, shards[entry.name].offsets, entry.shape)
            for one in opened
            for shards in (one.frame.sharding.shards,)
            for entry in one.frame.layout.entries
            if entry.name in shards and entry.size_bytes
        }

    def trees(self) -> dict[str, Any]:
        """Return the attached values of the commit without their tensors."""
        for opened in self._each_until_read():
            with_objects = self._tried(opened, self._objects)
            if with_objects is not None:
                return {name: with_objects[name] for name in opened.frame.sharding.names}
        self._raise_if_unreadable({"the attached values": []})
        raise StateError("The commit has no attached values. Attach values before the first commit of each world.")

    def plain(self) -> tuple[Values, bytes]:
        """Return the plain values of a copy, and the random state of its worker."""
        for opened in self._each_until_read():
            found = self._tried(opened, self._plain)
            if found is not None:
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
            entries.append(Entry(entry.name, entry.dtype, entry.shape, places[entry.offset], entry.size_bytes))
        memory = torch.empty(end, dtype=torch.uint8)
        content = memory.numpy().data
        sizes = {entry.offset: entry.size_bytes for entry in entries}
        ranges = [(frame.tensors + at, content[to : to + sizes[to]]) for at, to in places.items() if sizes[to]]
        self._read(opened, ranges)
        random = self._reader.read(opened.copy, frame.random, frame.tensors - frame.random)
        length = int.from_bytes(random[:LENGTH_BYTES], "little")
        place = Frame(Layout(entries, end), 0, 0, end, frame.sharding)
        objects = self._objects(opened)
        return Values(memory, place, objects, {}), random[LENGTH_BYTES : LENGTH_BYTES + length]

    def _objects(self, opened: _Opened) -> dict[str, Any]:
        begin = opened.frame.objects
        found: dict[str, Any] = pickle.loads(self._reader.read(opened.copy, begin, opened.length - begin))
        return found

    # ---------------------------------------------------------------------------------------------- copies and failures

    def _each(self) -> Iterator[_Opened]:
        """Yield one copy of each digest, except where none can be read. Headers are read when they are needed."""
        for digest in self._digests:
            opened = self._opened(digest)
            if opened is not None:
                yield opened

    def _each_until_read(self) -> Iterator[_Opened]:
        """Yield copies until the caller has read from one: one of each digest, then the next after each failure."""
        for digest in self._digests:
            while (opened := self._opened(digest)) is not None:
                yield opened
                if self._open.get(digest) is opened:
                    break  # it can be read, and the caller wants another digest

    def _opened(self, digest: int) -> _Opened | None:
        while digest not in self._open and self._left[digest]:
            copy = self._left[digest].pop(0)
            try:
                self._open[digest] = self._parsed(copy)
            except (CopyError, ValueError) as error:
                self._failed(copy, error)
        return self._open.get(digest)

    def _parsed(self, copy: CopyOf) -> _Opened:
        frame, _ = parse_header(self._reader.header(copy), _ENDLESS)
        length = self._reader.sealed(copy).length
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

    def _raise_if_unreadable(self, missing: Mapping[str, Sequence[Box]]) -> None:
        """Raise CollectiveError if copies could not be read: the next world has others."""
        if not self._failures:
            return
        names = [_described(name, boxes) for name, boxes in itertools.islice(missing.items(), MAX_NAMES)]
        more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
        hosts = [f"{copy.host} (slot {copy.slot}: {error})" for copy, error in self._failures]
        raise CollectiveError(
            f"parts of attached values cannot be read: {listed(names)}{more}. Their copies are on {listed(hosts)}"
        )

    # ---------------------------------------------------------------------------------------------------- reading parts

    def load(self, targets: Mapping[str, Piece], when_opened: Callable[[], object] | None = None) -> None:
        """Read the content of all local tensors.

        ``when_opened``: is called when each copy that is needed has been opened, so that its checksum is correct, and
        nothing has been read.

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
        missing = {name: [box_of(piece.shard, piece.local.shape)] for name, piece in targets.items()}
        missing = {name: boxes for name, boxes in missing.items() if not boxes[0].is_empty}
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
            names = [_described(name, boxes) for name, boxes in itertools.islice(missing.items(), MAX_NAMES)]
            raise StateError(f"The copies of the commit do not contain {listed(names)}.")

    def _open_all(self, targets: Mapping[str, Piece], missing: Mapping[str, list[Box]]) -> None:
        """Open the copies that ``load`` reads. Raises CollectiveError if one is needed that cannot be read."""
        left: Mapping[str, list[Box]] = missing
        copies = self._each()
        while left and (opened := next(copies, None)) is not None:
            _, left = _cut(opened, targets, left)
        if left:
            self._raise_if_unreadable(left)

    def _transfer(self, items: Sequence[BlockRead], opened: _Opened) -> bool:
        """Read items into their targets. Return True. Raises CopyError."""
        ranges: list[tuple[int, memoryview]] = []
        through: list[BlockRead] = []
        for item in items:
            if item.target.is_cpu and item.target.is_contiguous() and not prefers_span(item):
                ranges += runs(item, bytes_of(item.target), tuple(item.target.shape), item.into.begin)
            else:
                through += in_pieces(item)
        self._read(opened, ranges)
        if through:
            self._stage(opened, through)
        return True

    def _stage(self, opened: _Opened, items: Sequence[BlockRead]) -> None:
        """Read items into a staging buffer, as many at once as it has place for, and copy them into their targets."""
        sizes = [round_up(staged_bytes(item), ALIGNMENT_BYTES) for item in items]
        staging = torch.empty(min(max(STAGING_BYTES, max(sizes)), sum(sizes)), dtype=torch.uint8)
        content = staging.numpy().data
        ranges: list[tuple[int, memoryview]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        used = 0
        for item, size in zip(items, sizes, strict=True):
            if used + size > staging.numel():
                self._flush(opened, ranges, copies)
                ranges, copies, used = [], [], 0
            more, copy = staged(item, staging[used : used + size], content[used : used + size])
            ranges += more
            copies.append(copy)
            used += size
        self._flush(opened, ranges, copies)

    def _flush(
        self,
        opened: _Opened,
        ranges: list[tuple[int, memoryview]],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._read(opened, ranges)
        with torch.no_grad():
            for target, value in copies:
                target.copy_(value)

    def _read(self, opened: _Opened, ranges: list[tuple[int, memoryview]]) -> None:
        ranges.sort(key=lambda pair: pair[0])
        for begin in range(0, len(ranges), RANGES):
            self._reader.read_into(opened.copy, ranges[begin : begin + RANGES])


def _cut(
    opened: _Opened, targets: Mapping[str, Piece], missing: Mapping[str, Sequence[Box]]
) -> tuple[list[BlockRead], dict[str, list[Box]]]:
    """Return the blocks to read from a copy, and what is missing then."""
    items: list[BlockRead] = []
    left: dict[str, list[Box]] = {}
    for name, boxes in missing.items():
        entry = opened.entries.get(name)
        shard = opened.frame.sharding.shards.get(name)
        if entry is None or shard is None or not entry.size_bytes:
            left[name] = list(boxes)
            continue
        stored = box_of(shard, entry.shape)
        piece = targets[name]
        rest: list[Box] = []
        for box in boxes:
            common = box.within(stored)
            if common.is_empty:
                rest.append(box)
                continue
            rest += box.without(common)
            at, into = common.relative_to(shard.offsets), common.relative_to(piece.shard.offsets)
            items.append(BlockRead(opened.frame.tensors + entry.offset, entry.shape, at, piece.local, into))
        if rest:
            left[name] = rest
    return items, left


def _described(name: str, boxes: Sequence[Box]) -> str:
    places = ", ".join(
        "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.begin, box.end, strict=True)) + "]" for box in boxes
    )
    return f"{name}{places}"
