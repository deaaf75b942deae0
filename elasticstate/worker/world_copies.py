"""The copies of commits from which a world of a sharded job starts, in the memory of all its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticstate.copies.client import CopyClient
from elasticstate.core.types import CopyOf
from elasticstate.state.shards import CopyHeader

_SILENCE_S = 10.0  # of a copy server, after which its copy counts as unreachable: another copy may serve


class WorldCopies:
    """Reader of copies (see state.shards.CopyReader)."""

    def __init__(self, addresses: Mapping[str, str], key: bytes) -> None:
        """``addresses``: "ip:port" of the copy server of each host. ``key``: the job's key for commit tags."""
        self._client = CopyClient(addresses, key, _SILENCE_S)

    def header(self, copy: CopyOf) -> CopyHeader:
        opened = self._client.open(copy)
        return CopyHeader(opened.header, opened.sealed.length, opened.sealed.checksum)

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._client.read_into(copy, ranges)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()
