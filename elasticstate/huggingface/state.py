"""TrainingState: the state of a Trainer or of a loop with an Accelerator, which create their objects in each world."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler  # type: ignore[import-untyped]
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

import elasticstate as elastic
from elasticstate.compat.libraries import clear_singletons, set_local_place
from elasticstate.errors import UsageError
from elasticstate.extension import (
    local_place,
    random_state,
    set_random_state,
    starting_size,
    world_rank,
    world_size,
)

_OBJECTS = ("model", "optimizer", "scheduler", "scaler", "loader")  # the script creates them, perhaps in each world
_OTHERS = ("begun", "workers", "trainer", "log_history")


class TrainingState(elastic.TorchState):
    """State whose model, optimizer, scheduler, scaler and loader are known only when a world trains.

    ``attach`` names the objects of the present world, and ``load`` gives them the values of the state. Until then the
    state keeps the values themselves: of the objects of the last world, or copies of the commit.

    Args:
        workers: the global batch is that of so many workers. Default: ``-np``.
        values: further values that the training changes, such as ``best=0.0``. They become attributes.

    Raises UsageError if a value has the name of an object of the training, or ``workers`` is less than 1.
    """

    begun: bool  # the initial values are committed
    workers: int  # those whose batches make the global batch; 0 before the first world
    trainer: Any  # the position of a Trainer's loop
    log_history: list[dict[str, float]]  # of a Trainer

    def __init__(self, workers: int | None = None, **values: Any) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"workers={workers}: must be at least 1")
        if taken := sorted({*_OBJECTS, *_OTHERS} & set(values)):
            raise UsageError(f"{taken[0]}= cannot be given: TrainingState has a value of this name. Rename yours.")
        mine: dict[str, Any] = {"begun": False, "workers": workers or 0, "trainer": None, "log_history": []}
        super().__init__(**dict.fromkeys(_OBJECTS), **mine, **values)
        self.exclude_from_check("log_history")  # contains times
        self._held: dict[str, Any] = {}  # the values of objects that the present world has not loaded yet
        self._last: dict[str, Any] = {}  # the objects of the last world
        self._attached: dict[str, Any] = {}
        self._random = b""

    def sync(self) -> None:
        """Sync, and make the process ready for new objects: Accelerate must not remember the last world."""
        super().sync()
        self._held = {key: value for key, value in self.capture().items() if key.split(".")[0] in _OBJECTS}
        for name in _OBJECTS:
            if getattr(self, name) is not None:
                self._last[name] = getattr(self, name)
            setattr(self, name, None)
        self._attached = {}
        if not self.workers:
            self.workers = starting_size()  # the same in each world: a first world may fail before its first commit
        self._random = random_state()
        clear_singletons()
        set_local_place(local_place())

    def attach(self, **objects: Any) -> None:
        """Name objects of the present world. ``load`` must follow.

        Raises UsageError for a second object of one kind.
        """
        for name, value in objects.items():
            if value is not None and self._attached.setdefault(name, value) is not value:
                raise UsageError(f"There is a second {name} in this world. Only one can be trained.")

    def attached(self, name: str) -> Any:
        """Return the object of the present world; None if there is none yet."""
        return self._attached.get(name)

    def last(self, name: str) -> Any:
        """Return the object of the last world of this process; None if there is none."""
        return self._last.get(name)

    def load(self, *names: str) -> None:
        """Give attached objects the values of the state. ``names``: those to load; without, all that are attached."""
        fresh = [name for name in names or self._attached if name in self._attached and getattr(self, name) is None]
        for name in fresh:
            setattr(self, name, self._attached[name])
        loaded = {key: value for key, value in self._held.items() if key.split(".")[0] in fresh}
        self._held = {key: value for key, value in self._held.items() if key not in loaded}
        if any(loaded.get(name) is not None for name in fresh):
            present = super().capture()
            super().apply({**present, **{key: v for key, v in loaded.items() if v is not None or "." in key}})

    def begin(self, batch: int, accumulation: int) -> None:
        """Load the objects, and continue with the random numbers of the commit; at first, commit the initial values.

        Rank 0 prints the global batch, as it does not follow from the size of the present world.
        """
        self.load()
        if world_rank() == 0:
            whole = batch * accumulation * self.workers
            print(f"global batch {whole} = {batch} x {accumulation} x {self.workers} workers", flush=True)
        self._last = {}
        if self.begun:
            set_random_state(self._random)
        else:
            self.begun = True
            super().commit()

    def commit(self, every: int = 1) -> None:
        """Commit as ``State.commit``. Between the batches of one optimizer step, a call does nothing."""
        if self.loader is None or self.loader.step_ends:
            super().commit(every)

    def check_host_updates(self) -> None:
        """End the tick as ``State.check_host_updates``. Between the batches of one step, a call does nothing."""
        if self.loader is None or self.loader.step_ends:
            super().check_host_updates()

    def capture(self) -> dict[str, Any]:
        return {**super().capture(), **self._held}

    def apply(self, values: Mapping[str, Any]) -> None:
        unknown = {name for name in _OBJECTS if values[name] is not None and getattr(self, name) is None}
        if not unknown:
            self._held = {}
            super().apply(values)
            return
        mine = {key: value for key, value in values.items() if key.split(".")[0] in unknown}
        self._held = {key: _copied(value) for key, value in mine.items()}
        super().apply({**values, **dict.fromkeys(unknown)})

    def _value_kinds(self) -> dict[str, bool]:
        return {**super()._value_kinds(), **dict.fromkeys(_OBJECTS, False)}


def _copied(value: Any) -> Any:
    """Return a copy of a tensor or array, which is memory of the commit. Other values belong to the caller already."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def run(function: Callable[..., Any] | None = None, /, *, workers: int | None = None, **values: Any) -> Any:
    """Make ``function(state, ...)`` elastic, as ``elasticstate.run`` does, with a new ``TrainingState``.

    The decorated function is called without the state: ``main()``. ``run(workers=8, best=0.0)`` passes arguments to the
    ``TrainingState``.
    """
    if function is None:
        return functools.partial(run, workers=workers, **values)
    elastic_function = elastic.run(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return elastic_function(TrainingState(workers, **values), *args, **kwargs)

    return call


# --------------------------------------------------------------------------------------------------------------- loader
# The loader of a training: an ElasticDataLoader made from a DataLoader, as a Trainer or a script iterates over it.


_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
_WITH_WORKERS = ("prefetch_factor", "persistent_workers")


def check_dataset(dataset: Any) -> None:
    """Raise UsageError for a data set without length or indices."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"{type(dataset).__name__} has no length or no indices, so its samples cannot be divided among the ranks "
            "of a changing world. Use a data set with __len__() and __getitem__()."
        )


def batches_of(loader: DataLoader[Any]) -> Any:
    """Return the batch sampler of a loader, without those by which Accelerate shares its batches among the ranks."""
    batches = loader.batch_sampler
    while isinstance(batches, BatchSamplerShard):
        batches = batches.batch_sampler
    return batches


def is_shuffled(loader: DataLoader[Any], remedy: str = "Give the DataLoader batch_size= and shuffle= only.") -> bool:
    """Return True if ``loader`` has ``shuffle=True``. Raises UsageError for a sampler of the user's own."""
    batches = batches_of(loader)
    sampler = getattr(batches, "sampler", loader.sampler)
    is_random = type(sampler) in (RandomSampler, SeedableRandomSampler)
    if type(sampler) is SubsetRandomSampler:
        is_random = sorted(sampler.indices) == list(range(len(loader.dataset)))  # type: ignore[arg-type]
    if getattr(type(batches), "__iter__", None) is not BatchSampler.__iter__ or not (
        is_random or type(sampler) is SequentialSampler
    ):
        raise UsageError(
            f"The DataLoader has a {type(sampler).__name__} and a {type(batches).__name__}, but elasticstate orders "
            f"the samples itself. {remedy}"
        )
    if type(loader).__iter__.__module__.partition(".")[0] not in ("torch", "torchdata", "accelerate"):
        raise UsageError(
            f"{type(loader).__name__} has an __iter__() of its own, which elasticstate would not call. Use a plain "
            "DataLoader, and its collate_fn=."
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        raise UsageError("A RandomSampler with replacement= or num_samples= cannot use each sample once. Remove these.")
    if len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        raise UsageError(
            f"The {type(sampler).__name__} has {len(sampler)} of the {len(loader.dataset)} samples of the data set. "  # type: ignore[arg-type]
            "Use torch.utils.data.Subset instead."
        )
    return is_random


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


# --------------------------------------------------------------------------------------------------------------- checks
# Checks that the libraries are in the same world as elasticstate, and in a mode that can be elastic.


_MODES = ("NO", "MULTI_CPU", "MULTI_GPU")


def check_world(what: str, size: int) -> None:
    """Raise UsageError if Accelerate's world has another size: each rank would train alone, without an error."""
    if size != world_size():
        raise UsageError(
            f"{what} is in a world of {size}, and elasticstate in a world of {world_size()}. Create it inside the "
            "function decorated with run. On a machine without GPUs, use TrainingArguments(use_cpu=True) or "
            "Accelerator(cpu=True)."
        )


def refuse(what: str, remedy: str) -> None:
    """Raise UsageError for a feature that elasticstate does not support."""
    raise UsageError(f"{what} is not supported by elasticstate.huggingface. {remedy}")


def check_accelerator(accelerator: Any) -> None:
    """Raise UsageError for modes of an Accelerator in which the ranks hold different states, or share batches."""
    check_world("The Accelerator", accelerator.num_processes)
    mode = accelerator.distributed_type.value
    if mode not in _MODES:
        refuse(f"Distributed type {mode}", "Only DistributedDataParallel on CPUs or NVIDIA GPUs can be elastic.")
    if accelerator.parallelism_config is not None:
        refuse("parallelism_config", "Remove it: each rank must hold the whole model.")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name):
            refuse(f"{name}=True", "Remove it: elasticstate divides the batches itself.")
