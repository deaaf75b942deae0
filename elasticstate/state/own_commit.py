"""This worker's own commit as a copy of the commit line: its shards are read from its memory, and not by its agent."""

from __future__ import annotations

from collections.abc import Sequence

from elasticstate.core.types import CopyOf, ShardSource, SlotId
from elasticstate.errors import CopyError
from elasticstate.state.blocks import copy_ranges
from elasticstate.state.buffer import Buffer
from elasticstate.state.reshard import CommitCopies
from elasticstate.state.shards import CopyReader, SealedContent

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
    return CommitCopies(_WithOwnCommit(reader, own), [here, *sources])


class _WithOwnCommit:
    """Reader of all copies (see CopyReader). The own buffer does not change: this worker alone writes to it."""

    def __init__(self, others: CopyReader, own: Buffer) -> None:
        self._others, self._own = others, own

    def header(self, copy: CopyOf) -> bytes:
        if copy.slot != _HERE:
            return self._others.header(copy)
        if not self._own.is_intact():
            raise CopyError("its checksum is wrong")
        return self._own.memory[: self._own.frame.random].numpy().tobytes()

    def sealed(self, copy: CopyOf) -> SealedContent:
        return self._own if copy.slot == _HERE else self._others.sealed(copy)

    def read(self, copy: CopyOf, offset: int, length: int) -> bytes:
        if copy.slot != _HERE:
            return self._others.read(copy, offset, length)
        return self._own.memory[offset : offset + length].numpy().tobytes()

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if copy.slot != _HERE:
            self._others.read_into(copy, ranges)
            return
        copy_ranges(self._own.memory, ranges)

    def close(self) -> None:
        self._others.close()
