"""A copy that is being made or received. It is not visible until it is complete and its checksum is correct."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elasticstate._native import copy
from elasticstate.copies.sealed import Sealed
from elasticstate.copies.store_file import StoreFile
from elasticstate.errors import CopyError

_LOOK_INTERVAL_S = 0.5

GoOn = Callable[[], bool]


class IncomingCopy:
    """The first ``offset`` bytes of a copy. One thread at a time owns it: only the owner writes to its memory."""

    def __init__(self, sealed: Sealed, size_bytes: int, file: StoreFile) -> None:
        self.sealed, self.size_bytes, self.file = sealed, size_bytes, file
        self.offset = 0
        self.is_abandoned = False
        self._found = 0  # CRC-32C of the bytes
        self._changed = threading.Condition()
        self._is_owned = False
        self._interrupt: Callable[[], None] = lambda: None

    @contextmanager
    def owned(self, interrupt: Callable[[], None], go_on: GoOn) -> Iterator[None]:
        """Own this copy. A previous owner is interrupted, because its peer has probably lost the connection.

        ``interrupt`` ends the calls in which this owner waits. Raises CopyError if the copy is abandoned.
        """
        with self._changed:
            while self._is_owned:
                self._interrupt()
                if not self._changed.wait(_LOOK_INTERVAL_S) and not go_on():
                    raise CopyError("this copy store closes")
            self.check_wanted()
            self._is_owned, self._interrupt = True, interrupt
        try:
            yield
        finally:
            with self._changed:
                self._is_owned = False
                if self.is_abandoned:
                    self.file.close()
                self._changed.notify()

    def abandon(self) -> None:
        """Close the file, or let the owner end soon with CopyError and close it. Call it once."""
        with self._changed:
            self.is_abandoned = True
            if self._is_owned:
                self._interrupt()
            else:
                self.file.close()

    def check_wanted(self) -> None:
        if self.is_abandoned:
            raise CopyError(f"{self.sealed} is not wanted any more")

    # ------------------------------------------------------------------------------------------------- for the owner

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that are not there."""
        return self.sealed.length - self.offset

    def write(self, data: Any) -> None:
        """Write the next bytes, and compute their checksum in the same pass.

        Raises CopyError if the copy is abandoned.
        """
        self.check_wanted()
        end = self.offset + len(data)
        target: Any = memoryview(self.file.memory())[self.offset : end]
        self._found = copy(target, data, self._found)
        self.offset = end

    def restart(self) -> None:
        """Drop the bytes."""
        self.offset = self._found = 0

    def is_good(self) -> bool:
        """Return True if all bytes are there, and their checksum is that of the seal."""
        return self.offset == self.sealed.length and self._found == self.sealed.checksum
