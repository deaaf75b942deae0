"""The loader of a training: an ElasticDataLoader made from a DataLoader, as a Trainer or a script iterates over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import elasticstate as elastic
from elasticstate.errors import UsageError

_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
_WITH_WORKERS = ("prefetch_factor", "persistent_workers")


def check_dataset(dataset: Any) -> None:
    """Raise UsageError for a data set without length or indices."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"{type(dataset).__name__} has no length or no indices, so its samples cannot be divided among the ranks "
            "of a changing world. Use a data set with __len__() and __getitem__()."
        )


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Return True if ``loader`` has ``shuffle=True``. Raises UsageError for a sampler of the user's own."""
    kinds = type(loader.sampler), type(loader.batch_sampler)
    if loader.batch_size is None or kinds not in ((RandomSampler, BatchSampler), (SequentialSampler, BatchSampler)):
        raise UsageError(
            f"The DataLoader has a {kinds[0].__name__} and a {kinds[1].__name__}, but elasticstate "
            " orders the samples itself. Give the DataLoader batch_size= and shuffle= only."
        )
    if not isinstance(loader.sampler, RandomSampler):
        return False
    if loader.sampler.replacement or loader.sampler.num_samples != len(loader.sampler.data_source):
        raise UsageError("A RandomSampler with replacement= or num_samples= cannot use each sample once. Remove these.")
    return True


def elastic_loader(
    loader: DataLoader[Any], global_batch: int, batch: int, *, shuffle: bool, seed: int, drop_last: bool
) -> elastic.ElasticDataLoader:
    """Return a loader with the data set and the options of ``loader``."""
    options = {name: getattr(loader, name) for name in _OPTIONS}
    if loader.num_workers:
        options |= {name: getattr(loader, name) for name in _WITH_WORKERS}
    return elastic.ElasticDataLoader(
        loader.dataset,  # type: ignore[arg-type]
        global_batch_size=global_batch,
        micro_batch_size=batch,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        **options,
    )


class TrainingLoader:
    """View of an ElasticDataLoader: its length is that of a whole epoch, and ``batches`` iterates over the rest of one.

    ``unit``: the number of samples that the length counts as one.
    """

    def __init__(self, loader: elastic.ElasticDataLoader, unit: int, batches: Callable[[], Iterator[Any]]) -> None:
        self.dataset = loader.dataset
        self.set_epoch = loader.set_epoch
        self._loader, self._unit, self._batches = loader, unit, batches

    def __len__(self) -> int:
        samples = len(self.dataset)
        return samples // self._unit if self._loader.drop_last else -(-samples // self._unit)

    def __iter__(self) -> Iterator[Any]:
        return self._batches()
