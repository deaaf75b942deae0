"""Commit storage: the memory that holds the two buffers of a snapshot."""

from __future__ import annotations

import mmap
import secrets
from typing import Protocol

import torch

from elasticstate._native import ControlPage


class CommitStorage(Protocol):
    """Two buffers, and the control page with their seals."""

    @property
    def page(self) -> ControlPage: ...

    @property
    def owner(self) -> bytes:
        """16 bytes in each seal that identify the owner of the commits."""

    @property
    def key(self) -> bytes:
        """The job's key for commit tags (seals.py)."""

    def renew(self) -> None:
        """Replace a stale page and both buffers by new ones that hold the newest commit.

        Raises OSError if there are no new ones.
        """

    def open(self, index: int) -> torch.Tensor:
        """Return the whole of buffer ``index`` (0 or 1) as it is: ``uint8[n]``, where n may be 0."""

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        """Return ``uint8[n]`` with n >= size_bytes. The content may be lost, so the buffer must not be sealed.

        Raises CommitStorageError when there is too little memory.
        """


class PrivateStorage:
    """Memory of this process, for a state without ``elasticrun``. Its commits end with the process."""

    def __init__(self) -> None:
        self.page = ControlPage(None)
        self.owner = secrets.token_bytes(16)
        self.key = secrets.token_bytes(32)
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def renew(self) -> None:
        """Do nothing: no other process can make this page stale."""

    def open(self, index: int) -> torch.Tensor:
        return self._buffers[index]

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        self._buffers[index] = torch.empty(0, dtype=torch.uint8)  # release the old memory before taking more
        self._buffers[index] = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        return self._buffers[index]
