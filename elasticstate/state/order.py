"""The order of an epoch's samples. It is computed by position, so it needs no memory for any number of samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elasticstate import present_world
from elasticstate._native import permute
from elasticstate.errors import NotInWorldError, UsageError

MOST_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Order:
    """An order of range(n) for each epoch: random, drawn from seed and epoch, or from first to last.

    Raises UsageError if ``seed`` is not between 0 and 2**64 - 1.
    """

    n: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < MOST_SEEDS:
            raise UsageError(f"seed={self.seed}: must be a number from 0 to 2**64 - 1")

    def indices(self, epoch: int, start: int, count: int, step: int = 1) -> torch.Tensor:
        """Return the samples at positions ``start``, ``start + step``, ...: ``int64[count]``."""
        if not self.shuffle:
            return start + step * torch.arange(count)
        found = torch.empty(count, dtype=torch.int64)
        permute(found, self.n, self.seed, epoch, start, step)
        return found


def share(total: int, rank: int, size: int) -> int:
    """Return the number of samples of one rank when ``total`` samples are dealt out round robin."""
    return (total + size - 1 - rank) // size


def world_rank() -> int:
    """Return the rank in the present world; 0 outside a world."""
    try:
        return present_world.rank()
    except NotInWorldError:
        return 0


def world_size() -> int:
    """Return the size of the present world; 1 outside a world."""
    try:
        return present_world.size()
    except NotInWorldError:
        return 1


def world_is_new() -> bool:
    """Return True in a world in which all members are new processes."""
    try:
        return present_world.world().fresh
    except NotInWorldError:
        return False


def world_generation() -> int:
    """Return the generation number of the present world; 0 outside a world."""
    try:
        return present_world.generation()
    except NotInWorldError:
        return 0
