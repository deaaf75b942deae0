"""Readable copies of commits: the buffers of this host's slots, and files of the store."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from elasticstate._native import ControlPage, checksum
from elasticstate.commits import owner_of
from elasticstate.copies.sealed import Sealed, read_header
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError

VERIFY_BYTES = 64 << 20  # one step of a verification: a server that closes waits for one step


class SealedSlot(Protocol):
    """The files of a slot (agent.host_storage.SlotFiles)."""

    @property
    def page(self) -> ControlPage:
        """The control page, which has the seals."""

    def duplicate(self, index: int) -> int:
        """Return a new descriptor of a buffer. Safe on any thread. Raises OSError when the files are closed."""


class Source:
    """A copy that is open for reading, mapped. ``close`` it: a copy that is open keeps its memory."""

    def __init__(
        self,
        sealed: Sealed,
        memory: Any,
        release: Callable[[], None] = lambda: None,
        is_unchanged: Callable[[], bool] | None = None,
    ) -> None:
        """``is_unchanged``: returns False once the bytes may change; None: they never change."""
        self.sealed = sealed
        self.memory = memory
        self.is_fixed = is_unchanged is None
        self._release = release
        self._is_unchanged = is_unchanged

    @property
    def place(self) -> tuple[SlotId, int]:
        """The slot and the index of the buffer."""
        return self.sealed.slot, self.sealed.index

    def close(self) -> None:
        self.memory = None
        self._release()

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.memory[offset : offset + length])

    def part(self, offset: int, most_bytes: int) -> memoryview:
        """Return the memory of the next sealed bytes from this offset on. A worker may write to it."""
        return memoryview(self.memory)[offset : min(offset + most_bytes, self.sealed.length)]

    def header(self) -> bytes:
        return read_header(self.read, self.sealed.length)

    def check_ranges(self, ranges: list[tuple[int, int]]) -> None:
        """Raise CopyError for a range that is not within the sealed bytes."""
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self.sealed.length:
                raise CopyError(f"{self.sealed} has {self.sealed.length} bytes, not {length} at {offset}")

    def check_unchanged(self) -> None:
        """Raise CopyError if the bytes may have changed since the copy was opened."""
        if self._is_unchanged is not None and not self._is_unchanged():
            raise CopyError(f"{self.sealed} is gone: its worker has written another commit to this buffer")

    def checksum(self, begin: int, end: int, start: int = 0) -> int:
        """Return the CRC-32C of bytes, continued from ``start``, without the GIL."""
        return checksum(self.memory, begin, end, start)

    def is_intact(self, go_on: Callable[[], bool]) -> bool:
        """Return True if the checksum of the seal is correct. Raises CopyError when ``go_on`` returns False."""
        found = 0
        for at in range(0, self.sealed.length, VERIFY_BYTES):
            if not go_on():
                raise CopyError("this copy server closes")
            found = self.checksum(at, min(at + VERIFY_BYTES, self.sealed.length), found)
        return found == self.sealed.checksum


class _Mapped(NamedTuple):
    """The mapping of a buffer, which is made once: each new one would cause page faults for all of its pages."""

    file: tuple[int, int, int]  # device, inode, length
    memory: Any


class SlotBuffers:
    """The sealed buffers of this host's slots. Safe on any thread."""

    def __init__(self, job_id: str, host: str, slots: Mapping[int, SealedSlot]) -> None:
        self._job_id, self.host = job_id, host
        self._slots = slots
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, int], _Mapped] = {}

    def newest(self, slot: SlotId) -> CommitId | None:
        """Return the newest commit in the buffers of a slot of this host; None if there is none."""
        files = self._slots.get(slot.slot)
        found = [self._sealed(files, slot, index) for index in (0, 1)] if files is not None else []
        return max((sealed.commit for sealed in found if sealed is not None), default=None)

    def pin(self, slot: SlotId, commit: CommitId, until_ns: Callable[[int], int]) -> bool:
        """Let the worker not overwrite this commit until ``until_ns(its length)``. Return False if it is not sealed."""
        files = self._slots.get(slot.slot)
        for index in (0, 1):
            sealed = self._sealed(files, slot, index) if files is not None else None
            if files is not None and sealed is not None and sealed.commit == commit:
                files.page.pin(index, until_ns(sealed.length))
                return True
        return False

    def unpin(self, slot: SlotId) -> None:
        files = self._slots.get(slot.slot)
        for index in (0, 1):
            if files is not None:
                files.page.pin(index, 0)

    def open(self, slot: SlotId, commit: CommitId) -> Source | None:
        """Open the buffer that holds this commit; None if there is none."""
        files = self._slots.get(slot.slot) if slot.host == self.host else None
        if files is None:
            return None
        for index in (0, 1):
            sealed = self._sealed(files, slot, index)
            if sealed is not None and sealed.commit == commit:
                with suppress(OSError, ValueError):  # the slot has got other files
                    return self._source(files, sealed)
        return None

    def _source(self, files: SealedSlot, sealed: Sealed) -> Source:
        def is_unchanged() -> bool:
            now = self._sealed(files, sealed.slot, sealed.index)
            return now is not None and now.content == sealed.content

        fd = files.duplicate(sealed.index)
        try:
            return Source(sealed, self._map(fd, sealed), is_unchanged=is_unchanged)
        finally:
            os.close(fd)

    def _map(self, fd: int, sealed: Sealed) -> Any:
        """Return the mapped buffer. No process shortens it, so SIGBUS cannot occur. Raises OSError or ValueError."""
        key, found = (sealed.slot.slot, sealed.index), os.fstat(fd)
        file = found.st_dev, found.st_ino, found.st_size
        if found.st_size < sealed.length:
            raise ValueError(f"the buffer has {found.st_size} bytes, its seal covers {sealed.length}")
        with self._lock:
            mapped = self._mapped.get(key)
            if mapped is None or mapped.file != file:
                memory = mmap.mmap(fd, found.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
                mapped = self._mapped[key] = _Mapped(file, memory)
            return mapped.memory

    def _sealed(self, files: SealedSlot, slot: SlotId, index: int) -> Sealed | None:
        found = files.page.sealed(index, owner_of(self._job_id, self.host, slot.slot))
        if found is None:
            return None
        generation, tick, layout, length, crc, tag = found
        return Sealed(slot, CommitId(generation, tick), index, layout, length, crc, tag)
