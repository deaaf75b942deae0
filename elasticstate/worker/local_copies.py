"""Copies that the worker's own host keeps: their bytes are read from the memory of the host, without its server."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

from elasticstate.copies.client import CopyClient
from elasticstate.copies.sealed import Sealed
from elasticstate.core.types import CommitId, CopyOf, SlotId
from elasticstate.errors import CopyError
from elasticstate.state.blocks import copy_ranges


class LocalCopies:
    """Reader of all copies (see state.shards.CopyReader). ``close`` also closes the client.

    The copy server verifies a copy when it is opened. Only then this reader maps the file, and only if the file has the
    content that was opened. From then on, the agent does not use that file for another copy.
    """

    def __init__(
        self,
        client: CopyClient,
        host: str,
        share: Callable[[SlotId, CommitId], tuple[int, tuple[int, int, int]] | None],
    ) -> None:
        """``share``: returns descriptor and identity of a copy that this host keeps (StorageLink.ask_for_copy)."""
        self._client, self._host, self._share = client, host, share
        self._opened: dict[CopyOf, Sealed] = {}
        self._mapped: dict[CopyOf, Any] = {}  # None: read it from the server

    def header(self, copy: CopyOf) -> bytes:
        return self._client.header(copy)

    def sealed(self, copy: CopyOf) -> Sealed:
        found = self._opened[copy] = self._client.sealed(copy)
        return found

    def read(self, copy: CopyOf, offset: int, length: int) -> bytes:
        return self._client.read(copy, offset, length)

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if copy not in self._mapped:
            self._mapped[copy] = self._map(copy) if copy.host == self._host and copy in self._opened else None
        memory = self._mapped[copy]
        if memory is None:
            self._client.read_into(copy, ranges)
            return
        try:
            copy_ranges(memory, ranges)
        except ValueError as error:
            raise CopyError(str(error)) from error
        self._client.check_open()

    def _map(self, copy: CopyOf) -> Any:
        """Return the mapped copy; None if this host has none of this content, or its agent is gone."""
        sealed = self._opened[copy]
        try:
            found = self._share(copy.slot, copy.commit)
        except OSError:
            return None
        if found is None:
            return None
        fd, content = found
        try:
            if content != sealed.content or os.fstat(fd).st_size < sealed.length:
                return None
            return mmap.mmap(fd, sealed.length, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError:
            return None
        finally:
            os.close(fd)

    def close(self) -> None:
        self._mapped.clear()
        self._client.close()
