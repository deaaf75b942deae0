"""The order in which an epoch takes its samples: asked for by position, so that it takes no memory, however many."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import elasticstate
from elasticstate._native import permute
from elasticstate.errors import NotInWorldError, UsageError

MOST_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Order:
    """An order of range(n) for each epoch: a random one, drawn from seed and epoch, or from first to last."""

    n: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < MOST_SEEDS:
            raise UsageError(f"seed={self.seed}: takes a number from 0 to 2**64 - 1")

    def indices(self, epoch: int, start: int, count: int, step: int = 1) -> torch.Tensor:
        """The samples at positions ``start``, ``start + step``, ...: ``int64[count]``."""
        if not self.shuffle:
            return start + step * torch.arange(count)
        found = torch.empty(count, dtype=torch.int64)
        permute(found, self.n, self.seed, epoch, start, step)
        return found


def share(total: int, rank: int, size: int) -> int:
    """How many of ``total`` samples this rank gets when they are dealt out in turn."""
    return (total + size - 1 - rank) // size


def world_rank() -> int:
    """The rank in the present world; 0 outside one."""
    try:
        return int(elasticstate.rank())
    except NotInWorldError:
        return 0


def world_size() -> int:
    """The size of the present world; 1 outside one."""
    try:
        return int(elasticstate.size())
    except NotInWorldError:
        return 1


def world_generation() -> int:
    """The number of the present world; 0 outside one."""
    try:
        return int(elasticstate.generation())
    except NotInWorldError:
        return 0
