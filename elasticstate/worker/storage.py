"""Commit storage of a worker under ``elasticrun``: files of its slot, created by the agent, that outlive the worker.

The agent passes descriptors. So the worker never opens a name that another user may have taken.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from elasticstate._native import ControlPage, FileMap
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import CopyOf
from elasticstate.errors import CommitStorageError, CopyError
from elasticstate.net.link import Given, StorageLink
from elasticstate.net.messages import BufferGrown, GrowBuffer
from elasticstate.replicas.client import ReplicaClient
from elasticstate.replicas.store import Sealed
from elasticstate.state.peer import PeerStorage
from elasticstate.state.reshard import copy_ranges


class AgentStorage:
    """The two buffers of a slot (see :class:`elasticstate.state.snapshot.CommitStorage`).

    ``get`` requests the files from the agent. ``ask`` sends another request and returns the answer.
    """

    def __init__(
        self, get: Callable[[], Given], owner: bytes, ask: Callable[[GrowBuffer, type[BufferGrown]], BufferGrown]
    ):
        self.owner = owner
        self._get = get
        self._ask = ask
        self._buffers: tuple[int, ...] = ()
        self.renew()

    def renew(self) -> None:
        given = self._get()
        self.key = given.key
        self.page = ControlPage(given.page)
        for fd in (*self._buffers, given.page, given.result, given.call):
            if fd is not None:
                os.close(fd)
        self._buffers = given.buffers
        self._maps: dict[int, FileMap] = {}

    def open(self, index: int) -> torch.Tensor:
        """Map the whole file, with all its pages. No process shortens the file, so SIGBUS cannot occur."""
        fd, known = self._buffers[index], self._maps.get(index)
        if known is None or not known.grow(fd):
            known = self._maps[index] = FileMap(fd)
        return torch.from_numpy(known.memory())

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        answer = self._ask(GrowBuffer(index, size_bytes), BufferGrown)
        if answer.error:
            raise CommitStorageError(answer.error)
        return self.open(index)


def open_peer(
    link: StorageLink, storage: AgentStorage, owner_of: Callable[[int], bytes], slot: int
) -> PeerStorage | None:
    """Return the commits of another worker of this host: see ``state.peer.PeerOf``. ``owner_of``: of a slot's."""
    found = link.ask_for_peer(slot)
    if found is None:
        return None
    number, (page, *buffers) = found
    return PeerStorage(number, owner_of(number), storage.key, page, buffers)


class LocalReplicas:
    """Reader of all copies (see state.reshard.CopyReader): of those that its own host keeps from the host's memory.

    The copy server verifies a copy when it is opened. Only then this reader maps the file, and only if the file has the
    content that was opened. From then on, the agent does not use that file for another copy.
    """

    def __init__(
        self,
        client: ReplicaClient,
        host: str,
        share: Callable[[SlotId, CommitId], tuple[int, tuple[int, int, int]] | None],
    ) -> None:
        """``share``: returns descriptor and identity of a copy that this host keeps (StorageLink.ask_for_copy)."""
        self._client, self._host, self._share = client, host, share
        self._opened: dict[CopyOf, Sealed] = {}
        self._mapped: dict[CopyOf, Any] = {}  # None: read it from the server

    def header(self, copy: CopyOf) -> bytes:
        return self._client.header(copy)

    def length(self, copy: CopyOf) -> int:
        found = self._opened[copy] = self._client.sealed(copy)
        return found.length

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
        sealed, found = self._opened[copy], None
        with suppress(OSError):
            found = self._share(copy.slot, copy.commit)
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
