"""Commit storage of a worker under ``elasticrun``: files of its slot, created by the agent, that outlive the worker.

The agent passes descriptors. So the worker never opens a name that another user may have taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from elasticstate._native import ControlPage, FileMap
from elasticstate.errors import CommitStorageError
from elasticstate.net.link import Given, StorageLink
from elasticstate.net.messages import BufferGrown, GrowBuffer
from elasticstate.state.peer import PeerStorage


class AgentStorage:
    """The two buffers of a slot (see :class:`elasticstate.state.storage.CommitStorage`).

    ``get`` requests the files from the agent. ``ask`` sends another request and returns the answer. Raises what ``get``
    raises.
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


class HostPeers:
    """Commits of the other workers of this host (see :class:`elasticstate.state.peer.Peers`)."""

    def __init__(self, link: StorageLink, storage: AgentStorage, owner_of: Callable[[int], bytes]) -> None:
        """``owner_of`` returns the owner of a slot's commits."""
        self._link = link
        self._storage = storage
        self._owner_of = owner_of

    def peer(self, slot: int) -> PeerStorage | None:
        found = self._link.ask_for_peer(slot)
        if found is None:
            return None
        number, (page, *buffers) = found
        return PeerStorage(number, self._owner_of(number), self._storage.key, page, buffers)
