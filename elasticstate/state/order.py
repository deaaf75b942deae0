"""The order of an epoch's samples. It is computed by position, so it needs no memory for any number of samples."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch

from elasticstate import present_world
from elasticstate._native import permute
from elasticstate.errors import NotInWorldError, UsageError

MOST_SEEDS = 1 << 64


_commits = 0  # begun by this process


def commits_begun() -> int:
    """Return how many commits of any state this process has begun."""
    return _commits


def note_commit() -> None:
    """Count a commit that begins."""
    global _commits
    _commits += 1


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


class Position:
    """Position of all ranks in an epoch over a data set: the state of a loader or sampler.

    The order of the samples depends on their number, so the length of the data set is part of the position. A data set
    may change between two epochs of a process, equally on all ranks. A new process needs the data set of the commit.

    Raises UsageError if ``seed`` is not between 0 and 2**64 - 1.
    """

    def __init__(self, dataset: Sized, shuffle: bool, seed: int) -> None:
        Order(len(dataset), shuffle, seed)  # raises UsageError for an invalid seed
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.consumed = 0
        self._dataset = dataset
        self._length: int | None = None  # of the data set when the present epoch began; None before
        self._has_begun = False  # this process has begun an epoch
        self._is_kept = False  # a state has captured or loaded this position: it is in the commits

    @property
    def dataset(self) -> Sized:
        """The data set. It cannot be replaced, because the position is one in this data set."""
        return self._dataset

    def state_dict(self) -> dict[str, Any]:
        self._is_kept = True
        length = len(self._dataset) if self._length is None else self._length
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "length": length,
            "shuffle": bool(self.shuffle),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position that ``state_dict()`` has returned, perhaps in another process.

        Raises UsageError if the samples of that position were in another order: the data set had another length, or
        ``shuffle`` was another one in the middle of the epoch.
        """
        self._is_kept = True
        epoch, consumed = state_dict["epoch"], state_dict["consumed"]
        length: int | None = state_dict.get("length")  # None in commits of older versions
        if length is not None and not self._has_begun:
            self._require_length(epoch, length)
            if 0 < consumed < length and state_dict.get("shuffle", self.shuffle) != self.shuffle:
                raise UsageError(
                    f"shuffle={self.shuffle}, but epoch {epoch} began with shuffle={not self.shuffle}. Do not change "
                    "the order of the samples within an epoch."
                )
        self.seed = state_dict["seed"]
        self._go_to(epoch, consumed, length)

    def _go_to(self, epoch: int, consumed: int, length: int | None = None) -> None:
        self.epoch, self.consumed, self._length = epoch, consumed, length

    @property
    def length(self) -> int:
        """Number of samples of the present epoch.

        Raises UsageError if the data set has changed since the epoch began, unless the epoch is over.
        """
        if self._length is None or self.consumed == 0:
            return len(self._dataset)
        if self._length - self.consumed >= self._least():
            self._require_length(self.epoch, self._length)
        return self._length

    def _least(self) -> int:
        """Return the number of samples of which the smallest step consists. With fewer the epoch is over."""
        return 1

    def _begin(self) -> int:
        """Begin or continue the epoch. Return its number of samples. Raises as ``length``."""
        self._length = self.length
        self._has_begun = True
        return self._length

    def _require_length(self, epoch: int, length: int) -> None:
        """Raise UsageError if the data set has another length than when an epoch began."""
        if len(self._dataset) != length:
            raise UsageError(
                f"The data set has {len(self._dataset)} samples, but epoch {epoch} began with {length}, so samples "
                "would be lost and others repeated. Use the same data set on all ranks and after a restart. A running "
                "job may change it between two epochs."
            )


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


def local_place() -> int:
    """Return the place among the workers of this host in the present world; 0 outside a world.

    The local leader has place 0. A survivor's place changes when workers of other slots leave or return.
    """
    try:
        return present_world.world().local_place
    except NotInWorldError:
        return 0


def libraries_local_rank() -> int:
    """Return the local rank for libraries, as in ``LOCAL_RANK``: see ``present_world.libraries_local_rank``."""
    return present_world.libraries_local_rank()


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
