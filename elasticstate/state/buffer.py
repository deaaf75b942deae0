"""Buffer: one of the two buffers of a commit storage, a file in the format of layout.py that may hold a commit."""

from __future__ import annotations

import hmac
import pickle
import time
from typing import Any

import msgspec
import numpy as np
import torch

from elasticstate._native import Pieces, checksum, scatter
from elasticstate.core.types import CommitId
from elasticstate.log import logger
from elasticstate.seals import commit_tag, part_tag
from elasticstate.state.copy_stream import CopyStream
from elasticstate.state.layout import Frame, Header, Layout, digest, parse, round_up, view
from elasticstate.state.plan import Plan
from elasticstate.state.storage import CommitStorage

_LOOK_INTERVAL_S = 0.0005

GRANULE_BYTES = 1 << 16  # the pickle of the objects grows by a few bytes now and then: avoid a new buffer for that
LENGTH_BYTES = 8  # length prefix of the random state, whose part of the buffer is longer


class Buffer:
    """One buffer and its seal. ``commit`` is None while the buffer holds no commit, or a partial one."""

    def __init__(self, index: int, storage: CommitStorage) -> None:
        self.index = index
        self._storage = storage
        self.commit: CommitId | None = None
        self.frame = Frame(Layout([], 0), 0, 0, 0)
        self.length = 0
        self.checksum = 0
        self._digest = 0
        self._header: Header | None = None  # the header whose encoding is in the memory
        self._header_checksum = 0
        self._header_tag = b""
        self._rest_tag: bytes | None = None  # tag of random state and objects; None: not computed yet
        self._places: tuple[Plan, list[torch.Tensor]] | None = None
        self._pinned_by: CopyStream | None = None
        self.memory = storage.open(index)
        self._find_commit()

    def _find_commit(self) -> None:
        """Find the commit that an earlier process left in this buffer."""
        found = self._storage.page.sealed(self.index, self._storage.owner)
        if found is None:
            return
        generation, tick, layout, self.length, self.checksum, tag = found
        commit = CommitId(generation, tick)
        try:
            self.frame, self._digest = parse(self.memory)
            if self._digest != layout or not self.frame.objects < self.length <= self.memory.numel():
                raise ValueError("the buffer does not contain the commit that was sealed")
            self._header_tag = part_tag(self._storage.key, self.memory[: self.frame.random].numpy())
            if not hmac.compare_digest(tag, self._tag(commit, self.checksum)):
                raise ValueError("another process than a worker of this job changed the buffer")
        except Exception as error:  # any damage
            logger.warning("discarded damaged commit %s (buffer %d): %s", commit, self.index, error)
            self.unseal()
            return
        self.commit = commit

    # ------------------------------------------------------------------------------------------------------- writing

    def begin(self, header: Header, private: bytes, objects_bytes: int) -> int:
        """Grow the buffer and write all parts before the tensors. Returns the header's checksum.

        The previous commit in this buffer is lost.
        """
        self._wait_for_copy()
        self.unseal()
        self.ensure_size(header.frame.objects + objects_bytes)
        self.frame = header.frame
        self._rest_tag = None
        self.length = self.frame.objects + objects_bytes
        content = self.memory.numpy()
        if self._header is not header:
            text = header.encode(self.memory.numel())
            meant = np.frombuffer(text, dtype=np.uint8)
            content[: len(text)] = meant
            self._digest, self._header_checksum, self._header = digest(text), checksum(meant, 0, len(text)), header
            self._header_tag = part_tag(self._storage.key, text)
        part = (len(private).to_bytes(LENGTH_BYTES, "little") + private).ljust(self.frame.tensors - self.frame.random)
        content[self.frame.random : self.frame.tensors] = np.frombuffer(part, dtype=np.uint8)
        return self._header_checksum

    def _wait_for_copy(self) -> None:
        """Wait while the agent copies this buffer for other hosts (see copies/pusher.py): as long as a copy in memory
        takes, and at most until the time that the agent has set."""
        while time.monotonic_ns() < self._storage.page.pinned_until(self.index):
            time.sleep(_LOOK_INTERVAL_S)

    def places(self, plan: Plan) -> list[torch.Tensor]:
        """Return the destinations of the tensors in ``plan.queued``, in order. Computed once per plan."""
        if self._places is None or self._places[0] is not plan:
            self._places = plan, [view(self.memory, entry, self.frame.tensors) for _, entry in plan.queued]
        return self._places[1]

    def seal(self, commit: CommitId, found: int) -> None:
        """Seal the complete content as ``commit``."""
        self.write_seal(commit, found)
        self.record_seal(commit, found)

    def write_seal(self, commit: CommitId, found: int) -> None:
        """Write the seal to the control page. Safe on any thread while no other thread changes this buffer."""
        tag = self._tag(commit, found)
        self._storage.page.seal(
            self.index, self._storage.owner, commit.generation, commit.tick, self._digest, self.length, found, tag
        )

    def _tag(self, commit: CommitId, found: int) -> bytes:
        """Return a tag that only processes of this job can compute, and that covers only what this process wrote."""
        key, frame = self._storage.key, self.frame
        if self._rest_tag is None:
            content = self.memory.numpy()
            random, objects = content[frame.random : frame.tensors], content[frame.objects : self.length]
            self._rest_tag = part_tag(key, random, objects)
        owner = self._storage.owner
        return commit_tag(key, owner, self.index, commit, self.length, found, self._header_tag, self._rest_tag)

    def record_seal(self, commit: CommitId, found: int) -> None:
        """Record the seal in this object, after ``write_seal``."""
        self.commit, self.checksum = commit, found

    def unseal(self) -> None:
        self._storage.page.unseal(self.index)
        self.commit = None

    def ensure_size(self, size_bytes: int) -> None:
        if self.memory.numel() < size_bytes:
            self.unpin()
            self._header = self._places = None
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.memory = self._storage.grow(self.index, round_up(size_bytes, GRANULE_BYTES))

    def grow_ahead(self, size_bytes: int) -> None:
        """Grow the buffer before a commit is begun. Its previous commit is lost."""
        self._wait_for_copy()
        self.unseal()
        self.ensure_size(size_bytes)

    def touch(self) -> None:
        self._header = None
        self.memory.zero_()

    def pin(self, copy_stream: CopyStream) -> None:
        """Register the memory once, so that a device can copy directly to and from it."""
        if self._pinned_by is None:
            copy_stream.pin(self.memory)
            self._pinned_by = copy_stream

    def unpin(self) -> None:
        """Undo ``pin``. Call it before the memory is released."""
        if self._pinned_by is not None:
            self._pinned_by.unpin(self.memory)
            self._pinned_by = None

    # ------------------------------------------------------------------------------------------------------- reading

    def load(self, pieces: Pieces) -> bool:
        """Copy the bytes to the addresses in ``pieces``, and return True if their checksum is correct. One pass."""
        return scatter(self.memory, pieces, 0, self.length) == self.checksum

    def is_intact(self) -> bool:
        """Return True if the checksum is correct."""
        return checksum(self.memory, 0, self.length) == self.checksum

    def objects(self) -> dict[str, Any]:
        content: Any = self.memory[self.frame.objects : self.length].numpy()
        found: dict[str, Any] = pickle.loads(content)
        return found

    def private(self) -> bytes:
        part = self.memory[self.frame.random : self.frame.tensors].numpy().tobytes()
        length = int.from_bytes(part[:LENGTH_BYTES], "little")
        return part[LENGTH_BYTES : LENGTH_BYTES + length]

    def transfer_header(self) -> bytes:
        """Return what ``Snapshot.incoming`` needs to receive this commit."""
        frame = self.frame
        return msgspec.msgpack.encode((frame.layout, self.length - frame.objects, frame.sharding))

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the first byte and after the last one; (0, 0) without memory."""
        begin = self.memory.data_ptr()
        return begin, begin + self.memory.numel()
