"""Where the commits of a worker under ``elasticrun`` live: files of its slot, made by its agent, which outlive it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import torch

from elasticstate._native import ControlPage
from elasticstate.commits import buffer_file
from elasticstate.errors import CommitSpaceError
from elasticstate.net.messages import NeedSpace, Space


class AgentSpace:
    """The two buffers of a slot (see :class:`elasticstate.state.space.Space`). ``ask`` has a question answered."""

    def __init__(self, prefix: str, page: ControlPage, owner: bytes, ask: Callable[[NeedSpace, type[Space]], Space]):
        self.page = page
        self.owner = owner
        self._prefix = prefix
        self._ask = ask

    def open(self, index: int) -> torch.Tensor:
        """The whole file, with all its pages. Nobody makes it shorter, so there is no SIGBUS."""
        try:
            fd = os.open(buffer_file(self._prefix, index), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return torch.empty(0, dtype=torch.uint8)
        try:
            length = os.fstat(fd).st_size
            if not length:
                return torch.empty(0, dtype=torch.uint8)
            mapped = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(fd)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        answer = self._ask(NeedSpace(index, size_bytes), Space)
        if answer.error:
            raise CommitSpaceError(answer.error)
        return self.open(index)
