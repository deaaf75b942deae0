"""The two last commits of one worker, in buffers that may outlive it.

A buffer is a safetensors file (see layout.py), and holds a commit if there is a seal that fits (``ControlPage``). The
older buffer is the one that is overwritten: its seal is taken away before its first byte changes, and the new one is
written last. Whatever happens in between, to this process or to the machine's power, the newest commit stays whole.

Buffers are kept as long as they are big enough: the first touch of fresh memory costs several times the copy itself.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any

import msgspec
import numpy as np
import torch

from elasticstate._native import Pieces, checksum, checksums, gather, scatter
from elasticstate.core.types import CommitId
from elasticstate.errors import StateError
from elasticstate.state.layout import Frame, Header, Layout, digest, parse, round_up
from elasticstate.state.plan import Plan, address, copy_odd, random_room, targets
from elasticstate.state.space import PrivateSpace, Space
from elasticstate.state.values import Captured, Values, dumps, is_array

GRANULE_BYTES = 1 << 16  # the pickle of the objects grows by a few bytes now and then: no new buffer for that
LENGTH_BYTES = 8  # before the random state, for the part that is kept for it is longer
NOTHING = Pieces([], [], [])

logger = logging.getLogger("elasticstate")


class Snapshot:
    """Writes and reads the commits in a space. Not thread-safe: one thread writes and reads.

    Made over a space that has commits of its owner, it holds them; what is damaged there is none.
    """

    def __init__(self, space: Space | None = None) -> None:
        self._space: Space = space if space is not None else PrivateSpace()
        buffers = [_Buffer(index, self._space) for index in (0, 1)]
        buffers.sort(key=lambda buffer: buffer.commit or CommitId(-1, -1))
        self._older, self._newer = buffers
        self._plan: Plan | None = None

    @property
    def newest(self) -> CommitId | None:
        """The id of the last sealed commit."""
        return self._newer.commit

    @property
    def previous(self) -> CommitId | None:
        """The id of the commit before it; None also while, and if, its buffer could not be overwritten."""
        return self._older.commit

    @property
    def size_bytes(self) -> int:
        """What a commit like the newest one takes; 0: there is none."""
        return self._newer.length if self._newer.commit is not None else 0

    def reserve(self, size_bytes: int) -> None:
        """Take memory for two commits of this size, and touch it: what is held already stays as it is.

        Raises CommitSpaceError when there is not enough.
        """
        for buffer in (self._newer, self._older):
            if buffer.commit is None:
                buffer.make_room(size_bytes)
                buffer.touch()

    # ---------------------------------------------------------------------------------------------------- a commit

    def write(self, captured: Captured, private: bytes, commit: CommitId) -> None:
        """Copy ``captured`` into the older buffer and seal it as ``commit``. ``private`` is never sent to others.

        Raises:
            StateError: something cannot be pickled, or is no dense tensor (the message names it). Both earlier commits
                are whole then; after any later error the newest one is.
            CommitSpaceError: there is no room for it.
        """
        tensors, arrays, objects = _sort_out(captured)
        blob = dumps(objects)
        plan = self._plan
        if plan is None or not plan.fits(tensors, arrays, len(private)):
            plan = self._plan = Plan(tensors, arrays, len(private), plan)
        buffer = self._older
        header_checksum = buffer.begin(plan.header, private, len(blob))
        if plan.odd:
            if any(tensors[name].is_cuda for name, _ in plan.odd if name in tensors):
                buffer.pin()
            copy_odd(buffer.memory, {**tensors, **arrays}, plan.odd, buffer.frame.tensors)
        buffer.memory.numpy()[buffer.frame.objects : buffer.length] = np.frombuffer(blob, dtype=np.uint8)
        begin = buffer.frame.random
        self._seal_older(gather(buffer.memory, plan.pieces, begin, buffer.length, header_checksum), commit)

    def restamp(self, commit: CommitId) -> None:
        """Give the newest commit another id. Raises StateError if there is none."""
        if self._newer.commit is None:
            raise StateError(f"there is no commit that could become {commit}")
        self._newer.seal(commit, self._newer.checksum)

    def forget(self) -> None:
        """No commit is held any more; the memory is kept."""
        for buffer in (self._newer, self._older):
            buffer.unseal()

    def drop_newest(self) -> None:
        """The commit before the newest one is the newest one now."""
        self._newer.unseal()
        self._newer, self._older = self._older, self._newer

    # --------------------------------------------------------------------------------------------------- and back

    def restore(self, live: Captured) -> Values:
        """The content of the newest commit that is whole, already written into what is like it among ``live``.

        One pass over the memory verifies and copies: so what is in ``live`` is to be given up when this raises. A
        damaged commit is dropped with a warning. The values are views of the buffer: copy them, never keep them.

        Raises StateError if there is no whole commit.
        """
        damaged = False
        while self._newer.commit is not None:
            buffer = self._newer
            found, addresses = targets(buffer.frame.layout, live, [self._newer.memory, self._older.memory])
            if buffer.is_whole(_pieces(buffer.frame, addresses)):
                return Values(buffer.memory, buffer.frame, buffer.objects(), found)
            self._give_up(buffer)
            damaged = True
        raise StateError(
            "both commits are damaged: nothing is left to restore"
            if damaged
            else "there is nothing to restore: no commit has been made yet"
        )

    def read(self, commit: CommitId) -> Values:
        """What was captured for ``commit``. Tensors and arrays are views of the buffer: copy them, never keep them.

        Raises StateError if that commit is not held, or is found to be damaged.
        """
        buffer = self._find(commit)
        if not buffer.is_whole(NOTHING):
            self._give_up(buffer)
            raise StateError(f"commit {commit} is damaged")
        return Values(buffer.memory, buffer.frame, buffer.objects(), {})

    def read_private(self, commit: CommitId) -> bytes:
        """The part of ``commit`` that is this worker's alone. To be called after ``restore`` or ``read``."""
        buffer = self._find(commit)
        return buffer.private()

    def aliases(self, captured: Captured) -> list[str]:
        """Names of the captured tensors and arrays that lie in one of the buffers."""
        addresses = {name: address(value) for name, value in captured.items() if is_array(value)}
        return [name for name, at in addresses.items() if self._newer.contains(at) or self._older.contains(at)]

    # ---------------------------------------------------------------------------------------- from worker to worker

    def outgoing(self) -> tuple[bytes, torch.Tensor]:
        """The newest commit as (what it consists of, flat bytes) for those who lack it; without the private part."""
        buffer = self._newer
        return (
            msgspec.msgpack.encode((buffer.frame.layout, buffer.length - buffer.frame.objects)),
            buffer.memory[buffer.frame.tensors : buffer.length],
        )

    def incoming(self, header: bytes, private: bytes) -> torch.Tensor:
        """Begin to receive a commit: ``uint8[n]`` of the older buffer, to be filled and then sealed."""
        layout, objects_bytes = msgspec.msgpack.decode(header, type=tuple[Layout, int])
        buffer = self._older
        random_bytes = random_room(len(private))
        buffer.begin(Header(layout, random_bytes), private, objects_bytes)
        return buffer.memory[buffer.frame.tensors : buffer.length]

    def seal_incoming(self, commit: CommitId, live: Captured) -> Values:
        """Seal what was received as the only commit: whoever lacked the job's state holds nothing else of worth.

        Returns what ``restore`` would: one pass over the memory makes the checksum and copies.
        """
        buffer = self._older
        found, addresses = targets(buffer.frame.layout, live, [self._newer.memory, buffer.memory])
        self._seal_older(scatter(buffer.memory, _pieces(buffer.frame, addresses), 0, buffer.length), commit)
        self._older.unseal()
        return Values(buffer.memory, buffer.frame, buffer.objects(), found)

    # ------------------------------------------------------------------------------------------------- to compare

    def verify(self) -> None:
        """Read the newest commit. Raises StateError if there is none, or if it is damaged: then it is dropped."""
        commit = self._newer.commit
        if commit is None:
            raise StateError("there is no commit to check: none has been made yet")
        if not self._newer.is_whole(NOTHING):
            self._give_up(self._newer)
            rest = f"commit {self.newest} is left" if self.newest is not None else "no commit is left"
            raise StateError(f"commit {commit} is damaged: its checksum is wrong; {rest}")

    def summary(self) -> tuple[int, int, int]:
        """The newest commit in three numbers: 63 bits of the layout, checksum of all tensors, that of all objects."""
        buffer, frame = self._newer, self._newer.frame
        layout = digest(msgspec.msgpack.encode(frame.layout)) >> 1
        tensors = checksum(buffer.memory, frame.tensors, frame.objects)
        return layout, tensors, checksum(buffer.memory, frame.objects, buffer.length)

    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        """(dtype, shape, checksum) of each tensor and array of the newest commit, and its objects."""
        buffer, frame = self._newer, self._newer.frame
        entries = frame.layout.entries
        found = checksums(
            buffer.memory, [frame.tensors + entry.offset for entry in entries], [entry.size_bytes for entry in entries]
        )
        tensors = {e.name: (e.dtype, e.shape, value) for e, value in zip(entries, found, strict=True)}
        return tensors, buffer.objects()

    # ----------------------------------------------------------------------------------------------------- the parts

    def _seal_older(self, found: int, commit: CommitId) -> None:
        self._older.seal(commit, found)
        self._newer, self._older = self._older, self._newer

    def _give_up(self, buffer: _Buffer) -> None:
        logger.warning(
            "commit %s (buffer %d) is damaged: its checksum is wrong; it is given up", buffer.commit, buffer.index
        )
        if buffer is self._newer:
            self.drop_newest()
        else:
            buffer.unseal()

    def _find(self, commit: CommitId) -> _Buffer:
        for buffer in (self._newer, self._older):
            if buffer.commit == commit:
                return buffer
        raise StateError(f"commit {commit} is not held, only {self.newest} and {self.previous}")


class _Buffer:
    """One of the two buffers of a space. ``commit`` is None while it holds none, or half of one."""

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
        self._pinned = False
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

    def seal(self, commit: CommitId, found: int) -> None:
        """All is written: from now on this is ``commit``."""
        self._space.page.seal(
            self.index, self._space.owner, commit.generation, commit.tick, self._digest, self.length, found
        )
        self.commit, self.checksum = commit, found

    def unseal(self) -> None:
        self._space.page.unseal(self.index)
        self.commit = None

    def make_room(self, size_bytes: int) -> None:
        if self.memory.numel() < size_bytes:
            self._unpin()
            self._header = None
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.memory = self._space.grow(self.index, round_up(size_bytes, GRANULE_BYTES))

    def touch(self) -> None:
        self._header = None
        self.memory.zero_()

    def pin(self) -> None:
        """Let CUDA copy straight into the memory: registered once, as long as it is the same."""
        if not self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            result = runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0)
            self._pinned = int(result) == 0  # if not: the copies are slower, and as good

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False

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


def _sort_out(
    captured: Captured,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Tensors, arrays, and objects."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    objects: dict[str, Any] = {}
    for name, value in captured.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif is_array(value):
            arrays[name] = value
        else:
            objects[name] = value
    return tensors, arrays, objects


def _pieces(frame: Frame, addresses: dict[int, int]) -> Pieces:
    sizes = {entry.offset: entry.size_bytes for entry in frame.layout.entries if entry.size_bytes}
    offsets = sorted(addresses)
    return Pieces(
        [addresses[offset] for offset in offsets],
        [sizes[offset] for offset in offsets],
        [frame.tensors + offset for offset in offsets],
    )
