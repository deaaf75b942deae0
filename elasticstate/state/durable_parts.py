"""StoredParts: the parts of a durable copy of a sharded state, as copies of a commit that a world starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from elasticstate.core.types import CopyOf, ShardSource, SlotId
from elasticstate.durable.copies import DamagedCopyError, Manifest
from elasticstate.durable.part_reader import PartReader
from elasticstate.durable.reader import StoredCopies
from elasticstate.errors import CollectiveError, CopyError
from elasticstate.state.layout import Frame, parse_header
from elasticstate.state.reshard import CommitCopies

_ANY_SIZE = 1 << 62  # the header describes a buffer, which may be longer than its commit


class _Length(NamedTuple):
    length: int


class StoredParts:
    """Reader of the parts of a copy (see state.shards.CopyReader). Part n counts as slot n of the host ``name``."""

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

    # ---------------------------------------------------------------------------------------------------- CopyReader

    def header(self, copy: CopyOf) -> bytes:
        with _errors_of_copies():
            return self._reader(copy).head

    def sealed(self, copy: CopyOf) -> _Length:
        return _Length(self._reader(copy).length)

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
        frame, _ = parse_header(memoryview(head), _ANY_SIZE)
    except ValueError as error:
        raise DamagedCopyError(f"the header is invalid: {error}") from None
    if (frame.tensors, frame.objects - frame.tensors) != (len(head), data_bytes):
        raise DamagedCopyError("the header does not describe the files")
    return frame
