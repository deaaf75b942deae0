"""Where the two buffers of a snapshot live."""

from __future__ import annotations

import mmap
import secrets
from typing import Protocol

import torch

from elasticstate._native import ControlPage


class Space(Protocol):
    """Two buffers, and the page with their seals."""

    @property
    def page(self) -> ControlPage: ...

    @property
    def owner(self) -> bytes:
        """16 bytes, in each seal: whose commits these are."""

    def open(self, index: int) -> torch.Tensor:
        """``uint8[n]``: the whole of buffer ``index`` (0 or 1) as it is; n may be 0."""

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        """``uint8[n]`` with n >= size_bytes. The content may be lost: only for a buffer that is not sealed.

        Raises CommitSpaceError when there is not enough.
        """


class PrivateSpace:
    """Memory of this process, for a state without ``elasticrun``: its commits end with it."""

    def __init__(self) -> None:
        self.page = ControlPage(None)
        self.owner = secrets.token_bytes(16)
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def open(self, index: int) -> torch.Tensor:
        return self._buffers[index]

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        self._buffers[index] = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
        self._buffers[index] = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        return self._buffers[index]
