"""Members: the ranks that make a call together. They are all ranks of the world, or those of a process set."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Members:
    """The ranks that make a call together, in one world.

    Args:
        generation: of the world.
        ranks: in the world, ascending.
        index: of this worker among them; -1: it is not one of them.
        calls: process group for the calls of the script; None: torch's default group.
        gradients: process group for gradients; None if there is only one member.
        process_set: number of the process set; 0: all ranks of the world.
        numbers: numbers for the calls of the script.
    """

    generation: int
    ranks: tuple[int, ...]
    index: int
    calls: weakref.ref[dist.ProcessGroup] | None = None  # torch owns the groups, and ends them with the world
    gradients: weakref.ref[dist.ProcessGroup] | None = None
    process_set: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group for the calls of the script, as torch's functions take it."""
        return None if self.calls is None else self.calls()

    @property
    def lane(self) -> dist.ProcessGroup | None:
        """The process group for gradients.

        It is another one than ``group``: if the parameters with gradients differ by rank, some ranks start a bucket in
        ``backward`` and others in ``step``. In ``group``, a call of the script could be matched with such a bucket.
        """
        return None if self.gradients is None else self.gradients()
