"""One of the two buffers of a space: a file of the format in layout.py, and whether it holds a commit."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import numpy as np
import torch

from elasticstate._native import Pieces, checksum, scatter
from elasticstate.core.types import CommitId
from elasticstate.state.layout import Frame, Header, Layout, digest, parse, round_up, view
from elasticstate.state.plan import Plan
from elasticstate.state.queue import Queue
from elasticstate.state.space import Space

GRANULE_BYTES = 1 << 16  # the pickle of the objects grows by a few bytes now and then: no new buffer for that
LENGTH_BYTES = 8  # before the random state, for the part that is kept for it is longer

logger = logging.getLogger("elasticstate")


class Buffer:
    """``commit`` is None while it holds none, or half of one."""

    def __init__(self, index: int, space: Space) -> None:
        self.index = index
        self._space = space
        self.commit: CommitId | None = None
        self.frame = Frame(Layout([], 0), 0, 0, 0)
        self.length = 0
        self.checksum = 0
        self._digest = 0
        self._header: Header | None = None  # the one that stands in the memory as it was meant
        self._header_checksum = 0
        self._places: tuple[Plan, list[torch.Tensor]] | None = None
        self._pinned_by: Queue | None = None
        self.memory = space.open(index)
        self._find_commit()

    def _find_commit(self) -> None:
        """What was left here by a process before this one."""
        found = self._space.page.sealed(self.index, self._space.owner)
        if found is None:
            return
        generation, tick, layout, length, self.checksum = found
        commit = CommitId(generation, tick)
        try:
            self.frame, self._digest = parse(self.memory)
            if self._digest != layout or not self.frame.objects < length <= self.memory.numel():
                raise ValueError("it is not the one that was sealed")
        except Exception as error:  # whatever is wrong with it
            logger.warning("commit %s (buffer %d) is damaged: %s; it is given up", commit, self.index, error)
            self.unseal()
            return
        self.commit, self.length = commit, length

    # ------------------------------------------------------------------------------------------------------- writing

    def begin(self, header: Header, private: bytes, objects_bytes: int) -> int:
        """Make room, and write all before the tensors; what was here is given up. Returns the header's checksum."""
        self.unseal()
        self.make_room(header.frame.objects + objects_bytes)
        self.frame = header.frame
        self.length = self.frame.objects + objects_bytes
        content = self.memory.numpy()
        if self._header is not header:
            text = header.encode(self.memory.numel())
            meant = np.frombuffer(text, dtype=np.uint8)
            content[: len(text)] = meant
            self._digest, self._header_checksum, self._header = digest(text), checksum(meant, 0, len(text)), header
        part = (len(private).to_bytes(LENGTH_BYTES, "little") + private).ljust(self.frame.tensors - self.frame.random)
        content[self.frame.random : self.frame.tensors] = np.frombuffer(part, dtype=np.uint8)
        return self._header_checksum

    def places(self, plan: Plan) -> list[torch.Tensor]:
        """Where the tensors go that the plan leaves to queues; made once for each plan."""
        if self._places is None or self._places[0] is not plan:
            self._places = plan, [view(self.memory, entry, self.frame.tensors) for _, entry in plan.queued]
        return self._places[1]

    def seal(self, commit: CommitId, found: int) -> None:
        """All is written: from now on this is ``commit``."""
        self.write_seal(commit, found)
        self.take_note(commit, found)

    def write_seal(self, commit: CommitId, found: int) -> None:
        """The part of ``seal`` that counts. From any thread, as long as no other one changes this buffer."""
        self._space.page.seal(
            self.index, self._space.owner, commit.generation, commit.tick, self._digest, self.length, found
        )

    def take_note(self, commit: CommitId, found: int) -> None:
        """The rest of ``seal``."""
        self.commit, self.checksum = commit, found

    def unseal(self) -> None:
        self._space.page.unseal(self.index)
        self.commit = None

    def make_room(self, size_bytes: int) -> None:
        if self.memory.numel() < size_bytes:
            self.unpin()
            self._header = self._places = None
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.memory = self._space.grow(self.index, round_up(size_bytes, GRANULE_BYTES))

    def touch(self) -> None:
        self._header = None
        self.memory.zero_()

    def pin(self, queue: Queue) -> None:
        """Let a device copy straight into the memory and out of it: registered once, as long as it is the same."""
        if self._pinned_by is None:
            queue.pin(self.memory)
            self._pinned_by = queue

    def unpin(self) -> None:
        """To be called before the memory is given back."""
        if self._pinned_by is not None:
            self._pinned_by.unpin(self.memory)
            self._pinned_by = None

    # ------------------------------------------------------------------------------------------------------- reading

    def is_whole(self, pieces: Pieces) -> bool:
        """Whether the checksum is right. On the way the bytes are written to where ``pieces`` says."""
        return scatter(self.memory, pieces, 0, self.length) == self.checksum

    def objects(self) -> dict[str, Any]:
        content: Any = self.memory[self.frame.objects : self.length].numpy()
        found: dict[str, Any] = pickle.loads(content)
        return found

    def private(self) -> bytes:
        part = self.memory[self.frame.random : self.frame.tensors].numpy().tobytes()
        length = int.from_bytes(part[:LENGTH_BYTES], "little")
        return part[LENGTH_BYTES : LENGTH_BYTES + length]

    def contains(self, address: int | None) -> bool:
        start = self.memory.data_ptr()
        return address is not None and start <= address < start + self.memory.numel()
