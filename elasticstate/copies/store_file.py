"""Files of the copy store: mapped, with all their blocks, and used again for later copies.

A new file costs more than its content: the kernel allocates and clears each page. So the store keeps the file of a
copy that is not needed any more, with its mapping, for the next copy. This is no more memory than a replication needs
in any case, because the previous copy stays until the next one is complete.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

from elasticstate.allocation import grow
from elasticstate.errors import CopyError

_ALLOCATE_BYTES = 64 << 20  # one step of an allocation: a store that closes waits for one step


class StoreFile:
    """One file and its mapping. The lock of the store protects ``name``, ``readers`` and ``is_shared``."""

    def __init__(self, name: str, fd: int) -> None:
        """Take ownership of the descriptor."""
        self.name, self.fd = name, fd
        self.readers = 0
        self.is_shared = False  # True: another process reads it, so it is not used again
        self._allocated = 0  # bytes that have blocks for sure
        self._mapped: Any = None

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close the descriptor. The memory stays as long as a reader has it."""
        self._mapped = None
        os.close(self.fd)

    def reserve(self, length: int, size_bytes: int, go_on: Callable[[], bool]) -> None:
        """Give the file this size, with all blocks of the first ``length`` bytes; the rest is never written.

        Raises OSError, or CopyError when ``go_on`` returns False.
        """
        before = self.size_bytes
        if self._allocated != length:
            os.ftruncate(self.fd, min(self._allocated, length))
            for end in range(_ALLOCATE_BYTES, length + _ALLOCATE_BYTES, _ALLOCATE_BYTES):
                if not go_on():
                    raise CopyError("this copy store closes")
                self._allocated = grow(self.fd, min(end, length))
            os.ftruncate(self.fd, size_bytes)
        elif before != size_bytes:
            os.ftruncate(self.fd, max(length, size_bytes))
        if before != size_bytes:
            self._mapped = None

    def memory(self) -> Any:
        """Return the mapped file."""
        if self._mapped is None:
            self._mapped = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return self._mapped
