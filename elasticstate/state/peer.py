"""Commits of another worker of the same host, which a newcomer reads from their memory without any group.

It copies the newest commit of its host before its first READY, and the root's when the others have stopped for it: see
docs/decisions/joins.md. The owner may overwrite a buffer meanwhile. It removes the seal before it changes the first
byte, so a copy is good if the same seal is there before and after it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticstate._native import ControlPage
from elasticstate.core.ids import CommitId
from elasticstate.log import logger
from elasticstate.state import rng
from elasticstate.state.snapshot import Buffer, Incoming, Snapshot, find_targets, transfer_header
from elasticstate.state.values import Captured, Values

_LOOK_INTERVAL_S = 0.001

Content = tuple[int, int, int]
"""Digest of the layout, length in bytes, and checksum of a commit."""


class SealReader:
    """The seals on a control page of another worker. This process never changes them."""

    def __init__(self, page: ControlPage) -> None:
        self._page = page

    @property
    def is_stale(self) -> bool:
        return self._page.is_stale

    def sealed(self, index: int, owner: bytes) -> tuple[int, int, int, int, int, bytes] | None:
        return self._page.sealed(index, owner)

    def unseal(self, index: int) -> None:
        """Do nothing: the commit is not this worker's."""


class PeerStorage:
    """The two buffers of another worker of this host, mapped read-only. Takes over the descriptors."""

    def __init__(self, slot: int, owner: bytes, key: bytes, page: int, buffers: Sequence[int]) -> None:
        self.slot, self.owner, self.key = slot, owner, key
        self._buffers = tuple(buffers)
        self._mapped: dict[int, torch.Tensor] = {}
        try:
            self.page = SealReader(ControlPage(page))
        finally:
            os.close(page)

    def close(self) -> None:
        """Close the descriptors. Memory of commits that are in use stays mapped."""
        for fd in self._buffers:
            os.close(fd)
        self._buffers = ()
        self._mapped.clear()

    def open(self, index: int) -> torch.Tensor:
        """Map the whole file, with all its pages. No process shortens the file, so SIGBUS cannot occur."""
        length = os.fstat(self._buffers[index]).st_size
        if not length:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        known = self._mapped.get(index)
        if known is None or known.numel() < length:
            mapped = mmap.mmap(self._buffers[index], length, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory cannot be written
                known = self._mapped[index] = torch.frombuffer(mapped, dtype=torch.uint8)
        return known

    def newest(self) -> CommitId | None:
        """Return the id of the newest commit."""
        found = [CommitId(*seal[:2]) for index in (0, 1) if (seal := self.page.sealed(index, self.owner)) is not None]
        return max(found, default=None)

    def find(self, commit: CommitId) -> PeerCommit | None:
        """Return this commit, if it is sealed and of this job."""
        for index in (0, 1):
            seal = self.page.sealed(index, self.owner)
            if seal is not None and CommitId(*seal[:2]) == commit:
                buffer = Buffer(index, self)  # type: ignore[arg-type]  # reads only
                return PeerCommit(self, buffer) if buffer.commit == commit else None
        return None

    def content(self, index: int) -> Content | None:
        """Return what tells the sealed content of a buffer from any other; None: it is not sealed.

        If it is the same before and after a copy, the copy is whole. A new stamp on the commit does not change it.
        """
        seal = self.page.sealed(index, self.owner)
        return None if seal is None else seal[2:5]


PeerOf = Callable[[int], PeerStorage | None]
"""Returns the commits of a living worker by its slot; -1: of one that holds the newest commit. None: there is none."""


class PeerCommit:
    """A commit in the memory of another worker."""

    def __init__(self, storage: PeerStorage, buffer: Buffer) -> None:
        self._storage, self.buffer = storage, buffer
        self.content = storage.content(buffer.index)

    def is_unchanged(self) -> bool:
        """Return True if the owner has not changed the commit since this object was made."""
        return self.content is not None and self._storage.content(self.buffer.index) == self.content

    def objects(self) -> dict[str, Any] | None:
        """Return the objects of the commit; None if it is damaged, or if its owner has changed it meanwhile."""
        buffer = self.buffer
        content = buffer.memory[buffer.frame.objects : buffer.length].numpy().tobytes()
        found: dict[str, Any] | None = pickle.loads(content) if buffer.is_intact() and self.is_unchanged() else None
        return found

    def load_into(self, live: Captured) -> tuple[Values, bytes] | None:
        """Copy the commit into the values of ``live`` that it fits. Return its values and its owner's random state.

        Return None if the commit is damaged, or if its owner has changed it meanwhile: the content of ``live`` is
        undefined then. The values that the pass could not copy are views of the owner's memory, so the caller must call
        ``is_unchanged`` after copying them.

        Devices copy from memory that is not pinned: CUDA cannot pin a read-only mapping.
        """
        buffer = self.buffer
        objects = buffer.memory[buffer.frame.objects : buffer.length].numpy().tobytes()
        private = buffer.private()
        found = find_targets(buffer.frame.layout, live, [buffer.memory], lambda device: None)
        if not buffer.load(found.pieces(buffer.frame)) or not self.is_unchanged():
            return None
        return Values(buffer.memory, buffer.frame, pickle.loads(objects), found.by_name), private

    def copy_to(self, snapshot: Snapshot, worker_key: str, generation: int) -> bool:
        """Copy the commit into ``snapshot``, which then seals it. Return False if its owner has changed it meanwhile.

        The random state is derived from that of the owner, as in a sync of this generation.
        """
        buffer = self.buffer
        private = rng.derived(rng.initial_seed(buffer.private()), worker_key, generation)
        header = transfer_header(buffer.frame, buffer.length)
        snapshot.incoming(header, private).copy_(buffer.memory[buffer.frame.tensors : buffer.length])
        return self.is_unchanged()


class PeerReader:
    """Reads commits of other workers of this host, and keeps the memory of the last one mapped.

    Copies are made into a snapshot, which the caller then seals by ``seal_incoming``.
    """

    def __init__(self, peer: PeerOf) -> None:
        self._peer = peer
        self.storage: PeerStorage | None = None  # that is open: it maps the memory of another worker
        self.can_read = True
        """False after an error."""
        self.seconds_ahead = 0.0
        """Duration of the copy made ahead that the last ``load`` used; 0 if it used none."""
        self._ahead: _ReadAhead | None = None

    def newest(self, slot: int = -1) -> tuple[CommitId, PeerCommit] | None:
        """Return the newest commit of the worker of a slot; -1: of one of this host that holds the newest commit."""
        storage = self._storage_of(slot)
        commit = storage.newest() if storage is not None else None
        if storage is None or commit is None:
            return None
        for index in (0, 1):
            storage.open(index)  # the root's next commits lie in both
        found = storage.find(commit)
        return None if found is None else (commit, found)

    def wait_for(self, slot: int, commit: CommitId, check: Callable[[], None]) -> PeerCommit | None:
        """Wait until the worker of a slot has sealed this commit. Return None if no worker is in the slot, or if that
        one has overwritten the commit: without collectives, it may have trained on.

        ``check`` raises when the generation is over, as the wait is then in vain.
        """
        while True:
            storage = self._storage_of(slot)
            if storage is None:
                return None
            newest = storage.newest()
            found = storage.find(commit)
            if found is not None:
                return found
            if newest is not None and newest > commit:
                return None
            check()
            time.sleep(_LOOK_INTERVAL_S)

    def _storage_of(self, slot: int) -> PeerStorage | None:
        known = self.storage
        return known if known is not None and known.slot == slot and not known.page.is_stale else self._open(slot)

    def _open(self, slot: int) -> PeerStorage | None:
        self.close()
        self.storage = self._peer(slot)
        return self.storage

    def close(self) -> None:
        """Release the memory."""
        if self.storage is not None:
            self.storage.close()
            self.storage = None

    def copy_newest(self, snapshot: Snapshot, worker_key: str) -> CommitId | None:
        """Copy the newest commit of another worker if it is newer than the snapshot's own. Return its id; None if there
        is none, or none that is whole. One with attached values would count as one of this worker's own shards."""
        try:
            found = self.newest()
        except OSError as error:
            logger.warning("the commits of other workers of this host cannot be read: %s", error)
            self.can_read, found = False, None
        if found is None or found[1].buffer.frame.sharding.names:
            return None
        commit, source = found
        if snapshot.newest is not None and commit <= snapshot.newest:
            return None
        return commit if source.buffer.is_intact() and source.copy_to(snapshot, worker_key, commit.generation) else None

    def read_ahead(
        self, root_slot: int, snapshot: Snapshot, worker_key: str, generation: int, live: Captured | None
    ) -> None:
        """Begin to copy the newest commit of the root, for a world that is about to form.

        ``live``: values into which it may be loaded at once; None: they must not change yet.
        """
        self.wait()
        found = self.newest(root_slot)
        self._ahead = _ReadAhead(found[1], snapshot, worker_key, generation, live) if found is not None else None

    def wait(self) -> bool:
        """Wait until the copy that ``read_ahead`` has begun is complete. Return False if none was begun."""
        if self._ahead is not None:
            self._ahead.thread.join()
        return self._ahead is not None

    def load(
        self,
        source: PeerCommit,
        snapshot: Snapshot,
        worker_key: str,
        generation: int,
        targets: Callable[[], Captured],
    ) -> Incoming | None:
        """Copy a commit and load it, unless that was done ahead. Return None if its owner has overwritten it.

        ``targets``: returns the live values into which it is loaded, after it was copied.
        """
        self.wait()
        ahead, self._ahead = self._ahead, None
        self.seconds_ahead = 0.0
        if ahead is not None and ahead.has(source):
            self.seconds_ahead = ahead.seconds
            return ahead.incoming or snapshot.load_incoming(targets())
        return snapshot.load_incoming(targets()) if source.copy_to(snapshot, worker_key, generation) else None


class _ReadAhead:
    """Copy of the root's newest commit by a thread, while the main thread creates the process group of the next world.
    At the switch the root only stamps that commit anew."""

    def __init__(
        self, source: PeerCommit, snapshot: Snapshot, worker_key: str, generation: int, live: Captured | None
    ) -> None:
        self._source = source
        self._is_whole = False
        self.incoming: Incoming | None = None  # after the thread's end, if the copy is whole and was loaded
        self.seconds = 0.0  # duration of the copy
        self.thread = threading.Thread(
            target=self._copy, args=(snapshot, worker_key, generation, live), name="elasticstate-read-ahead"
        )
        self.thread.start()

    def _copy(self, snapshot: Snapshot, worker_key: str, generation: int, live: Captured | None) -> None:
        started = time.monotonic()
        try:
            self._is_whole = self._source.copy_to(snapshot, worker_key, generation)
            if self._is_whole and live is not None:
                self.incoming = snapshot.load_incoming(live)
        except Exception as error:  # the main thread copies again, and raises the error if it is still there
            logger.debug("the root's commit was not copied ahead: %s", error)
        self.seconds = time.monotonic() - started

    def has(self, commit: PeerCommit) -> bool:
        """Return True if the copy is whole, and has the content of this commit. Call it after the thread's end."""
        return self._is_whole and commit.content == self._source.content
