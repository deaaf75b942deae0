"""ElasticSampler: Horovod's sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

import elasticstate
from elasticstate.errors import UsageError
from elasticstate.extension import Order, world_generation, world_rank, world_size
from elasticstate.horovod import world

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Sampler of the rest of an epoch over all ranks of the present world, with equally many indices on each.

    ``len()`` and ``iter()`` stay the same until a reset, so scripts can compute learning rates and progress from them.
    A second pass without ``set_epoch()`` repeats the first. A reset divides the samples that are not recorded yet among
    the ranks. A new epoch, a new world, a restored state, and ``reset()`` cause a reset.

    If the rest cannot be divided evenly, some ranks get one sample that other ranks also have. The state contains only
    the number of samples that the world has consumed. So record each batch, in the order of iteration.

    Args:
        dataset: any object with a length.
        shuffle: use an order drawn from seed and epoch; otherwise from first to last.
        seed: 0 to 2**64 - 1.

    Raises UsageError for an invalid seed.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._plain, self._at_reset = (
            elasticstate.ElasticSampler(dataset, shuffle=shuffle, seed=seed, rank=_rank, size=_size) for _ in range(2)
        )
        self._reset_in = 0  # the generation of the last reset

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``. Do nothing if it is the present epoch already."""
        if epoch != self.epoch:
            self._plain.set_epoch(epoch)
            self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of ``batch_size`` samples on *each* rank as consumed. ``batch_idx`` is ignored.

        Raises UsageError if ``batch_size`` is negative.
        """
        self._plain.record_batch(batch_size * _size())

    def record_indices(self, indices: list[int]) -> None:
        """Count these samples as consumed, and as many on each other rank.

        Raises UsageError if they are not the next ones of this rank.
        """
        share = self._share()
        recorded = -(-(self._plain.consumed - share.consumed) // _size())
        expected = [self._sample(recorded + i) for i in range(len(indices) if len(self) else 0)]
        if sorted(expected) != sorted(int(i) for i in indices):
            raise UsageError(
                "record_indices: these are not the next samples of this rank. Record all samples in the order of "
                "iteration."
            )
        self._plain.record_batch(len(indices) * _size())

    def reset(self) -> None:
        """Divide the samples that are not recorded among the ranks of the present world. Automatic in a new world."""
        self._at_reset.load_state_dict(self._plain.state_dict())
        self._reset_in = world_generation()

    @property
    def epoch(self) -> int:
        return self._plain.epoch

    @property
    def processed_num(self) -> int:
        """Number of samples that all ranks together have recorded in this epoch."""
        return self._plain.consumed

    @property
    def processed_indices(self) -> set[int]:
        """Samples that all ranks together have recorded in this epoch."""
        return set(self._order().indices(self.epoch, 0, self.processed_num).tolist())

    @property
    def remaining_indices(self) -> list[int]:
        """Samples that all ranks together had left in this epoch at the last reset, in their order."""
        share = self._share()
        return self._order().indices(share.epoch, share.consumed, share.length - share.consumed).tolist()

    @property
    def indices(self) -> list[int]:
        """Samples of this rank, as ``iter()`` yields them."""
        return list(self)

    @property
    def num_samples(self) -> int:
        return len(self)

    @property
    def total_size(self) -> int:
        """Number of samples that all ranks together yield: ``num_samples`` of each."""
        return len(self) * _size()

    @property
    def num_replicas(self) -> int:
        return _size()

    @property
    def rank(self) -> int:
        return _rank()

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch ``batch_idx``, which may be shorter than ``batch_size``."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        return self._plain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` has returned, here or in Horovod, whose ``processed_num`` is ``consumed`` here."""
        if state_dict.keys() == {"epoch", "processed_num"}:
            own = self._plain.state_dict()
            state_dict = {**own, "epoch": state_dict["epoch"], "consumed": state_dict["processed_num"]}
        self._plain.load_state_dict(state_dict)
        self.reset()

    def __iter__(self) -> Iterator[int]:
        own, padded = len(self._share()), len(self)
        last = [self._sample(own)] if own < padded else []
        yield from self._at_reset
        yield from last

    def __len__(self) -> int:
        """Return the number of indices that ``iter()`` yields, the same on all ranks. Constant until a reset."""
        share = self._share()
        return -(-(share.length - share.consumed) // _size())

    def _share(self) -> elasticstate.ElasticSampler:
        """Return the sampler as of the last reset, after a reset in a new world."""
        _size()  # joins the world
        if self._reset_in != world_generation():
            self.reset()
        return self._at_reset

    def _sample(self, i: int) -> int:
        """Return the i-th sample of this rank's share. After the end of all shares, the samples start again."""
        share = self._share()
        position = share.consumed + (_rank() + i * _size()) % (share.length - share.consumed)
        return int(self._order().indices(share.epoch, position, 1))

    def _order(self) -> Order:
        return Order(self._plain.length, self._plain.shuffle, self._plain.seed)


def _rank() -> int:
    return world.rank() if world.is_initialized() else world_rank()


def _size() -> int:
    return world.size() if world.is_initialized() else world_size()
