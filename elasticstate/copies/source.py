"""Readable copies of commits: the buffers of this host's slots, and files of the store."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

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
    """A copy that is open for reading. It owns its descriptor."""

    def __init__(self, sealed: Sealed, fd: int, is_unchanged: Callable[[], bool] | None = None) -> None:
        """``is_unchanged``: returns False once the bytes may change; None: they never change."""
        self.sealed = sealed
        self.fd = fd
        self.is_fixed = is_unchanged is None
        self._is_unchanged = is_unchanged
        self._mapped: Any = None

    @property
    def place(self) -> tuple[SlotId, int]:
        """The slot and the index of the buffer."""
        return self.sealed.slot, self.sealed.index

    def close(self) -> None:
        os.close(self.fd)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self.fd, length, offset)

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
        """Return the CRC-32C of bytes of the file, continued from ``start``, without the GIL."""
        if self._mapped is None:
            # No process shortens the file, so SIGBUS cannot occur.
            self._mapped = mmap.mmap(self.fd, self.sealed.length, mmap.MAP_SHARED, mmap.PROT_READ)
        return checksum(self._mapped, begin, end, start)

    def is_intact(self, go_on: Callable[[], bool]) -> bool:
        """Return True if the checksum of the seal is correct. Raises CopyError when ``go_on`` returns False."""
        found = 0
        for at in range(0, self.sealed.length, VERIFY_BYTES):
            if not go_on():
                raise CopyError("this copy server closes")
            found = self.checksum(at, min(at + VERIFY_BYTES, self.sealed.length), found)
        return found == self.sealed.checksum


class SlotBuffers:
    """The sealed buffers of this host's slots. Safe on any thread."""

    def __init__(self, job_id: str, host: str, slots: Mapping[int, SealedSlot]) -> None:
        self._job_id, self.host = job_id, host
        self._slots = slots

    def open(self, slot: SlotId, commit: CommitId) -> Source | None:
        """Open the buffer that holds this commit; None if there is none."""
        files = self._slots.get(slot.slot) if slot.host == self.host else None
        if files is None:
            return None
        for index in (0, 1):
            sealed = self._sealed(files, slot, index)
            if sealed is not None and sealed.commit == commit:
                with suppress(OSError):  # the slot has got other files
                    return self._source(files, sealed)
        return None

    def _source(self, files: SealedSlot, sealed: Sealed) -> Source:
        def is_unchanged() -> bool:
            now = self._sealed(files, sealed.slot, sealed.index)
            return now is not None and now.content == sealed.content

        return Source(sealed, files.duplicate(sealed.index), is_unchanged)

    def _sealed(self, files: SealedSlot, slot: SlotId, index: int) -> Sealed | None:
        found = files.page.sealed(index, owner_of(self._job_id, self.host, slot.slot))
        if found is None:
            return None
        generation, tick, layout, length, crc, tag = found
        return Sealed(slot, CommitId(generation, tick), index, layout, length, crc, tag)
