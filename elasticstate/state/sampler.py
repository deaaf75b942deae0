"""ElasticSampler: the remaining samples of an epoch, divided among the ranks of the present world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

from torch.utils.data import Sampler

from elasticstate.errors import UsageError
from elasticstate.state.order import Order, Position, share, world_rank, world_size

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

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``. Do nothing if it is the present epoch: the sampler continues where it was restored."""
        if epoch != self.epoch:
            self._go_to(epoch, 0)

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
