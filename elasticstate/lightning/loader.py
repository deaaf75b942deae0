"""The training loader as Lightning sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import elasticstate as elastic
from elasticstate.errors import UsageError


class TrainingBatches:
    """Adapter between Lightning's loops and an ElasticDataLoader. It ends the ticks.

    Lightning requests a batch when all that belongs to the previous batch is done: optimizer step, schedulers,
    callbacks, validation, logs. So this is the one place where the loops' progress is that of whole batches.

    Lightning counts the batches of an epoch from its beginning, the loader those that are left. ``len()`` returns the
    sum of the batches fetched before and those left.

    Args:
        loader: the loader. Raises UsageError if it cannot be used with Lightning.
        end_tick: called before each batch is fetched.
    """

    def __init__(self, loader: object, end_tick: Callable[[], None]) -> None:
        if isinstance(loader, TrainingBatches):  # a CombinedLoader of the user keeps the one of the last epoch
            loader = loader._loader
        if not isinstance(loader, elastic.ElasticDataLoader):
            raise UsageError(
                f"The training loader is a {type(loader).__name__}, which would begin the epoch again in each new "
                "world. Replace it with one elasticstate.ElasticDataLoader(dataset, global_batch_size=...)."
            )
        if loader.micro_batch_size is not None:
            raise UsageError(
                f"ElasticDataLoader(micro_batch_size={loader.micro_batch_size}): Lightning steps after each batch. "
                "Remove micro_batch_size, and give the Trainer accumulate_grad_batches=."
            )
        self._loader: elastic.ElasticDataLoader = loader
        self._end_tick = end_tick
        self._fetched = 0  # batches of the present epoch

    @property
    def sampler(self) -> TrainingBatches:
        """This object: Lightning calls ``set_epoch`` of a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``. Do nothing if it is the present epoch."""
        if epoch != self._loader.epoch:
            self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """Go to the first batch of ``epoch``, also from a later one: the job may have failed before its first tick."""
        self.load_state_dict({"loader": {"epoch": epoch, "consumed": 0, "seed": self._loader.seed}, "fetched": 0})

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the current batch, see ElasticDataLoader."""
        return self._loader.weight

    def __len__(self) -> int:
        return self._fetched + self._loader.steps_left

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            self._end_tick()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._fetched += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "fetched": self._fetched}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict["loader"])
        self._fetched = state_dict["fetched"]
