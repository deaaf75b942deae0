"""Members: the ranks that make a call together. They are all ranks of the world, or those of a process set."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from elasticstate.horovod.calls import Call


class EarlierCall(Protocol):
    """A call that this rank has made, and some other ranks not yet."""

    call: Call

    def start(self) -> None:
        """Start it, at the same point as all other ranks."""

    def wait_for_start(self) -> None:
        """Wait until all ranks have made it."""

    def fail(self, error: str) -> None:
        """End it: the call differs on other ranks."""


class RunningCall(Protocol):
    """A started call."""

    def is_over(self) -> bool:
        """Return True if its name may be used again."""


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
        earlier: calls of this rank that other ranks have not made yet, by key, in their order.
        running: started calls by key.
    """

    generation: int
    ranks: tuple[int, ...]
    index: int
    calls: weakref.ref[dist.ProcessGroup] | None = None  # torch owns the groups, and ends them with the world
    gradients: weakref.ref[dist.ProcessGroup] | None = None
    process_set: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    earlier: dict[str, EarlierCall] = field(default_factory=dict)
    running: dict[str, RunningCall] = field(default_factory=dict)

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
