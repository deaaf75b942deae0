"""ElasticSampler: the remaining samples of an epoch, divided among the ranks of the present world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.utils.data import Sampler

from elasticstate import present_world
from elasticstate._native import permute
from elasticstate.core.types import World
from elasticstate.errors import NotInWorldError, UsageError

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

    It is computed by position, so it needs no memory for any number of samples.

    Raises UsageError if ``seed`` is not between 0 and 2**64 - 1.
    """

    n: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"seed={self.seed}: must be a number from 0 to 2**64 - 1")

    def indices(self, epoch: int, start: int, count: int, step: int = 1) -> torch.Tensor:
        """Return the samples at positions ``start``, ``start + step``, ...: ``int64[count]``."""
        if not self.shuffle:
            return start + step * torch.arange(count, device="cpu")
        found = torch.empty(count, dtype=torch.int64, device="cpu")
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

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``. Do nothing if it is the present epoch, which continues where it was restored."""
        if epoch != self.epoch:
            self._go_to(epoch, 0)

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


_OUTSIDE = msgspec.structs.replace(present_world.alone(), generation=0, fresh=False)


def _world() -> World:
    try:
        return present_world.world()
    except NotInWorldError:
        return _OUTSIDE


def world_rank() -> int:
    """Return the rank in the present world; 0 outside a world."""
    return _world().rank


def world_size() -> int:
    """Return the size of the present world; 1 outside a world."""
    return _world().size


def local_place() -> int:
    """Return the place among the workers of this host in the present world; 0 outside a world.

    The local leader has place 0. A survivor's place changes when workers of other slots leave or return.
    """
    return _world().placement.local_place


def world_is_new() -> bool:
    """Return True in a world in which all members are new processes."""
    return _world().fresh


def world_generation() -> int:
    """Return the generation number of the present world; 0 outside a world."""
    return _world().generation


_CHUNK = 4096  # indices turned into Python integers at a time


class ElasticSampler(Position, Sampler[int]):
    """Sampler that yields each index of an epoch once over all ranks, also when the world changes within the epoch.

    It supports Horovod's interface. ``ElasticDataLoader`` does the same and counts the consumed samples itself.

    The sampler's state is (epoch, consumed, seed, length, shuffle). ``consumed`` is the number of samples of the
    epoch's order that *all ranks together* have consumed. The order depends on seed, epoch and length alone. Each
    ``iter()`` divides the remaining samples among the ranks of the present world, round robin. So report, after each
    step, the samples that the whole world has consumed::

        for epoch in range(state.epoch, epochs):
            state.sampler.set_epoch(epoch)
            for batch in DataLoader(dataset, batch_size, sampler=state.sampler):
                ...
                state.sampler.record_batch(batch_size * elasticstate.size())
                state.commit()

    Args:
        dataset: any object with a length.
        shuffle: use an order drawn from seed and epoch; otherwise from first to last.
        seed: 0 to 2**64 - 1.
        drop_last: leave out the last samples (fewer than the world has ranks), so that all ranks get equally many.
            Otherwise some ranks get one sample more than others, and possibly one batch more.
        rank, size: functions, called at each ``iter()`` and ``len()``. Default: rank and size of the present world, 0
            and 1 outside one.

    Raises UsageError for an invalid seed, and later if the data set has another length than when the epoch began.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: Callable[[], int] = world_rank,
        size: Callable[[], int] = world_size,
    ) -> None:
        super().__init__(dataset, shuffle, seed)
        self.drop_last = drop_last
        self._rank = rank
        self._size = size

    def record_batch(self, n_global: int) -> None:
        """Add ``n_global`` samples, of all ranks together, to the consumed samples, up to the data set's length.

        Raises UsageError if ``n_global`` is negative.
        """
        if n_global < 0:
            raise UsageError(
                f"record_batch({n_global}): must be at least 0, the number of samples that all ranks consumed"
            )
        self.consumed = min(self.consumed + n_global, self._begin())

    def __iter__(self) -> Iterator[int]:
        order, epoch = Order(self._begin(), self.shuffle, self.seed), self.epoch
        rank, size = self._rank(), self._size()
        start, end = self.consumed + rank, self.consumed + rank + size * len(self)
        for position in range(start, end, size * _CHUNK):
            count = min(_CHUNK, (end - position) // size)
            yield from order.indices(epoch, position, count, size).tolist()

    def __len__(self) -> int:
        """Return the number of indices that ``iter()`` would yield now.

        It becomes smaller with each ``record_batch``, and so does the length of a DataLoader with this sampler: it is 0
        at the end of an epoch. ElasticDataLoader has the length of a whole epoch.
        """
        remaining, size = self.length - self.consumed, self._size()
        return remaining // size if self.drop_last else share(remaining, self._rank(), size)

    def _least(self) -> int:
        return self._size() if self.drop_last else 1
