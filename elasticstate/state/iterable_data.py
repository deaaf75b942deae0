"""Data loaders, samplers and other objects with iterators, as values of a state."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from elasticstate.compat.loaders import is_loader, is_stateful_loader
from elasticstate.errors import UsageError
from elasticstate.state.order import Position

_DEPTH = 3  # of the search for loaders inside of an object
_MOST_PARTS = 100  # of a container that the search looks at
_OF_TORCH = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)


def is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def has_iterators(value: object) -> bool:
    """Return True for an object with a state that is iterated over, has methods that are generators, or contains an
    object with iterators."""
    if not is_stateful(value) or isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return False
    kind: Any = type(value)
    return _is_iterable(value) or _has_generators(kind) or _has_source(value, _DEPTH)


def has_exact_state(value: object) -> bool:
    """Return True if ``state_of`` returns the loaded state after ``load_state``, also before the next iterator."""
    return is_loader(value) or isinstance(value, Position)


def _is_iterable(value: object) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__next__")


@functools.cache
def _has_generators(kind: Any) -> bool:
    """Return True for a class with a method that is a generator, such as ``def batches(self): ... yield batch``."""
    return any(inspect.isgeneratorfunction(value) for base in kind.__mro__ for value in vars(base).values())


def _has_source(value: object, depth: int) -> bool:
    """Return True if an object, or a container, contains what its own iterators are likely to use."""
    parts = _parts(value) if isinstance(value, dict | list | tuple) else _parts(getattr(value, "__dict__", {}))
    return any(_is_source(part) or (depth > 1 and _may_hold(part) and _has_source(part, depth - 1)) for part in parts)


def _parts(container: Any) -> Iterator[Any]:
    """Yield the first values of a container."""
    return itertools.islice(container.values() if isinstance(container, dict) else container, _MOST_PARTS)


def _may_hold(part: object) -> bool:
    """Return True for a container, and for an object of a class that was not made for the mathematics of torch."""
    return isinstance(part, dict | list | tuple) or (is_stateful(part) and not isinstance(part, _OF_TORCH))


def _is_source(value: object) -> bool:
    """Return True for a part of an object that the object's own iterators are likely to use."""
    if isinstance(value, DataLoader | IterableDataset):
        return True
    return is_stateful(value) and _is_iterable(value) and not isinstance(value, torch.nn.Module)


def require_no_loader_inside(name: str, value: object, depth: int = _DEPTH) -> None:
    """Raise UsageError for a container with a loader: its position would be lost, as it would be pickled."""
    for part in _parts(value) if isinstance(value, dict | list | tuple) else ():
        if isinstance(part, dict | list | tuple) and depth > 1:
            require_no_loader_inside(name, part, depth - 1)
        elif isinstance(part, DataLoader):
            raise UsageError(
                f"state.{name} contains a {type(part).__name__}, whose position would be lost. Give each loader to the "
                "state as a value of its own."
            )


def require_own_position(name: str, value: object) -> None:
    """Raise UsageError for a loader or sampler without a state.

    It would be pickled, with its data set, into each commit. After a failure it begins the epoch again, and a new
    worker would get the root's share of the samples.
    """
    if isinstance(value, DataLoader):
        # Accelerate's loaders have state_dict(), which works if that of the loader inside does
        if not is_stateful(getattr(value, "base_dataloader", value)):
            raise UsageError(
                f"state.{name} is a {type(value).__name__}, which has no state_dict(): it would begin the epoch again "
                "in each new world, every worker would train on all of its samples, and each commit would contain the "
                "data set. Replace it with elasticstate.ElasticDataLoader, or keep it outside the state."
            )
    elif isinstance(value, DistributedSampler) and not is_stateful(value):
        raise UsageError(
            f"state.{name} is a {type(value).__name__}, which has the rank of one worker and no state_dict(): a new "
            "worker would get the samples of another rank, and each commit would contain the data set. Replace it with "
            "elasticstate.ElasticSampler, or train with elasticstate.ElasticDataLoader."
        )


def fault_of(loader: Any) -> str:
    """Return the reason why a StatefulDataLoader would lose or repeat samples, and the remedy; "" for other objects.

    Without a state of an iterable data set, ``load_state_dict()`` calls ``next()`` once for each batch taken before,
    and each call counts as a further batch: torchdata 0.11, ``stateful_dataloader.py``, ``_num_yielded``, with and
    without worker processes. An iterator with its own state is not detected: asking for that state may read data.
    """
    if not is_stateful_loader(loader):
        return ""
    sampler = getattr(loader.sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        return (
            f"its {type(sampler).__name__} divides the samples by a size of the world that never changes, so that "
            "samples are lost and others repeated in a world of another size. Use elasticstate.ElasticDataLoader."
        )
    dataset: object = loader.dataset
    if is_stateful(dataset) or not isinstance(dataset, IterableDataset):
        return ""
    return (
        f"{type(dataset).__name__} has no state_dict() and load_state_dict(). Unless its iterator has both, "
        f"StatefulDataLoader skips samples when it resumes for the second time in an epoch. Give the data set both: "
        f"see examples/stream.py."
    )
