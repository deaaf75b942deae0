"""ElasticDataLoader: batches for the present world. Every sample of an epoch counts exactly once."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from elasticstate.compat.modules import end_persistent_workers, is_loader, is_stateful_loader
from elasticstate.errors import UsageError
from elasticstate.log import logger
from elasticstate.state.sampler import Order, Position, commits_begun, share, world_generation, world_rank, world_size

_OURS = ("sampler", "batch_sampler", "generator")
_THEIRS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""Options of DataLoader that do not change which batches it returns, nor their order; ``in_order=False`` does."""


_NOW = (
    "the loop over epoch %d has no batches left, because the last commit was made in it after the last batch. The code "
    "after the loop runs now. To prevent that, commit after the loop instead of after the last batch: write "
    "'if loader.steps_left: state.commit()' inside the loop, and state.commit() as the last statement of the epoch."
)
_AGAIN = (
    "the loop over epoch %d has no batches left, because the last commit was made after it. The code after the loop "
    "runs again. To prevent that, use loader.epochs(n), or increase your counter of epochs before that commit."
)


class _Part(NamedTuple):
    """One batch of this rank."""

    indices: list[int]
    weight: float
    trained: int | None  # samples of the epoch that are trained after this batch; None: the step has more batches


class _PlannedBatches:
    """Batch sampler of the inner DataLoader. ``plan`` contains the batches that the DataLoader requested ahead."""

    def __init__(self, parts: Callable[[], Iterator[_Part]]) -> None:
        self.plan: deque[_Part] = deque()
        self._parts = parts

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan = deque()
        for part in self._parts():
            plan.append(part)
            yield part.indices


class ElasticDataLoader(Position):
    """Loader of the batches that this rank must train in the rest of the epoch::

        loader = elastic.ElasticDataLoader(dataset, batch_size=64)
        state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

        @elastic.run
        def train(state):
            model = DistributedDataParallel(state.model)
            for epoch in state.loader.epochs(20):
                for inputs, targets in state.loader:
                    ...
                    state.commit()

    The loader is a value of the state. A commit counts the batches that the loader has returned as trained. It does not
    count batches that workers fetched ahead. After a failure, or in another world, ``train`` runs again, and each
    ``for`` over the loader continues at the position of the commit. So end the tick (``commit``,
    ``check_host_updates``) after the current batch is trained, not before.

    An epoch is over when its ``for`` has ended. The position in a commit shows which one it was:

    - A commit inside the loop, also after the last batch, does not contain what the code after the loop does. If the
      job goes back to it, ``epochs`` yields this epoch once more: the ``for`` has the batches that are left, perhaps
      none, and the code after it runs. If that code cannot do without batches, leave out the commit after the last
      batch (``if loader.steps_left: state.commit()``).
    - A commit after the loop contains the whole epoch: ``epochs`` goes on with the next one. So let this commit be the
      last statement of the epoch.

    ``len(loader)`` is the number of steps of a whole epoch in the present world, also in the middle of an epoch, as for
    a DataLoader of torch. ``steps_left`` is the number of those that are left.

    A loader that is in no state, as for a validation, begins its epoch again in another world.

    The loader's state is (epoch, consumed, seed, length, shuffle), and ``over`` after the end of the loop: a few bytes
    for any number of samples. No collective runs. The length of the data set belongs to the position: on a rank or
    after a restart with another length, loading the state raises UsageError. Between two epochs, the data set may
    change, equally on all ranks.

    ``batch_size`` counts the samples of one rank, so the world's batch grows with the world. ``global_batch_size``
    counts the samples of all ranks: step i then trains the same samples for any size of the world, and the loss follows
    the same curve. The samples of each step are divided as evenly as possible. Where the shares differ (at the end of
    an epoch; or 64 samples on 5 ranks), the mean over ranks of a DDP gradient is not the mean over samples. To correct
    this, multiply the mean loss by ``weight``::

        loss = criterion(model(inputs), targets) * state.loader.weight

    A rank without a sample gets a sample of another rank with weight 0, because DDP needs every rank to take part.

    With ``micro_batch_size``, a larger share is split into several batches of one step, as many on each rank::

        for inputs, targets in state.loader:
            with state.loader.accumulate(model):
                (criterion(model(inputs), targets) * state.loader.weight).backward()
            if state.loader.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                state.commit()

    Args:
        dataset: a data set with a length and indices. (An iterable data set has its own position: put a
            ``torchdata.stateful_dataloader.StatefulDataLoader`` into the state instead.)
        batch_size: samples for each rank in one step.
        global_batch_size: samples for all ranks together in one step. Give either batch_size or global_batch_size.
        micro_batch_size: maximum number of samples in one batch. Requires ``global_batch_size``.
        shuffle: use an order drawn from seed and epoch; otherwise from first to last.
        seed: 0 to 2**64 - 1.
        drop_last: leave out the last samples if they do not fill a step.
        rank, size: functions, called at each ``iter()``. Default: rank and size of the present world, 0 and 1 outside
            one.
        options: for ``torch.utils.data.DataLoader``: num_workers, collate_fn, pin_memory, ... Persistent worker
            processes last until the end of a world, because they have the rank and size of that world.

    Raises:
        UsageError: an argument is invalid, or is an option that changes which batches come, or their order. The message
            names the argument and the remedy.
    """

    weight: float
    """Factor for the mean loss of the current batch. It is 1 where all ranks have equally many samples."""

    step_ends: bool
    """True if the current batch is the last one of its step."""

    def __init__(
        self,
        dataset: Sized,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: Callable[[], int] = world_rank,
        size: Callable[[], int] = world_size,
        **options: Any,
    ) -> None:
        has_indices = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
        if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and has_indices):
            raise UsageError(
                f"{type(dataset).__name__} has no length or no indices, so ElasticDataLoader cannot divide it among "
                "ranks. Put a torchdata.stateful_dataloader.StatefulDataLoader into the state instead."
            )
        if (batch_size is None) == (global_batch_size is None):
            raise UsageError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size}: give exactly one of the two."
            )
        if micro_batch_size is not None and global_batch_size is None:
            raise UsageError(
                f"micro_batch_size={micro_batch_size} requires global_batch_size=. Give that, or a smaller batch_size=."
            )
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        for name, value in sizes.items():
            if value is None:
                continue
            if not isinstance(value, SupportsIndex):
                raise UsageError(f"{name}={value}: must be a whole number")
            if value < 1:
                raise UsageError(f"{name}={value}: must be at least 1")
        _check_options(options)
        super().__init__(dataset, shuffle, seed)
        self.batch_size, self.global_batch_size, self.micro_batch_size = sizes.values()
        self.drop_last = drop_last
        self.weight, self.step_ends = 1.0, True
        self._rank, self._size = rank, size
        self._is_over = False  # a ``for`` has reached the end of this epoch, perhaps in another process
        self._ended_in_generation: int | None = None  # the generation in which one in this process did
        self._changes = 0  # counts loops over this loader, and changes of the position other than by them
        self._forked_for = (0, 0)  # the generation, and the length of the data set, of the last loop
        self._has_warned = False
        self._batches = _PlannedBatches(self._parts)
        self._random = torch.Generator()
        options |= {"batch_sampler": self._batches, "generator": self._random}
        self._loader: DataLoader[Any] = DataLoader(dataset, **options)  # type: ignore[arg-type]

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs from the present one to ``number - 1``, and begin each epoch before yielding it.

        The present epoch is left out if its ``for`` has ended, here or in the worker that made the commit.
        """
        if self._is_over:
            self.set_epoch(self.epoch + 1)
        while self.epoch < number:
            yield self.epoch
            self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch in the present world, at any position in the epoch.

        A step has one batch for each rank, or several with ``micro_batch_size``. In another world, ``batch_size``
        gives another length, and ``global_batch_size`` the same one.
        """
        return self._steps(self.length)

    @property
    def steps_left(self) -> int:
        """The number of steps that are left in the epoch, in the present world."""
        return self._steps(self.length - self.consumed)

    def _steps(self, samples: int) -> int:
        whole = self._step_size(self._size())
        return samples // whole if self.drop_last else -(-samples // whole)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "over": True} if self._is_over else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._is_over = state_dict.get("over", False)

    def __iter__(self) -> Iterator[Any]:
        if self._ended_in_generation == world_generation():
            raise UsageError(
                f"Epoch {self.epoch} is over. Begin the next one by 'for epoch in loader.epochs(n)' or "
                f"loader.set_epoch({self.epoch + 1})."
            )
        if not self._is_kept and 0 < self._forked_for[0] != world_generation():
            self._go_to(self.epoch, 0)  # a loader of a validation, which the end of the last world has interrupted
        self._changes += 1
        changes, length = self._changes, self._begin()
        if self.consumed and not self.steps_left and self._rank() == 0:  # a script that divides by their number fails
            logger.warning(_AGAIN if self._is_over else _NOW, self.epoch)
        self._random.manual_seed(self._seed_of_fetching())
        if self._forked_for != (world_generation(), length):
            end_persistent_workers(self._loader)  # they have the rank of the last world, and the data set as it was
            self._forked_for = world_generation(), length
        with torch.device("cpu"):  # torch's loader draws a number with our generator, on the script's default device
            batches = iter(self._loader)
        for batch in batches:
            if self._changes != changes:
                raise UsageError(
                    "The loader was restored, given another epoch, or iterated over a second time, inside a 'for' "
                    "loop over it. Begin a new loop."
                )
            _, self.weight, trained = self._batches.plan.popleft()
            self.step_ends = trained is not None
            if trained is not None:
                self.consumed = trained
            commits = commits_begun()
            yield batch
            if not self._is_kept and commits_begun() != commits and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "commits are made inside a loop over an ElasticDataLoader that is in no value of the state, so its "
                    "position is lost: in another world, or after a restart, it begins the epoch again. Give it to the "
                    "state: TorchState(..., loader=loader)."
                )
        if self._changes == changes:
            self._is_over, self._ended_in_generation = True, world_generation()

    def accumulate(self, model: object) -> AbstractContextManager[Any]:
        """Return a context for the backward pass of a batch. Only the last batch of a step exchanges gradients.

        ``model``: an object with ``no_sync()``, such as DDP and FSDP. For other models the context does nothing.
        """
        no_sync = getattr(model, "no_sync", None)
        return nullcontext() if self.step_ends or no_sync is None else no_sync()

    def _go_to(self, epoch: int, consumed: int, length: int | None = None) -> None:
        super()._go_to(epoch, consumed, length)
        self._is_over, self._ended_in_generation = False, None
        self._changes += 1

    def _seed_of_fetching(self) -> int:
        """Return the base seed of the DataLoader's worker processes: a function of seed, epoch, position and rank."""
        where = f"{self.seed}/{self.epoch}/{self.consumed}/{self._rank()}"
        return int.from_bytes(hashlib.blake2b(where.encode(), digest_size=7).digest(), "little")

    def _step_size(self, size: int) -> int:
        return self.global_batch_size or (self.batch_size or 1) * size

    def _least(self) -> int:
        return self._step_size(self._size()) if self.drop_last else 1

    def _parts(self) -> Iterator[_Part]:
        """Yield this rank's batches of the rest of the epoch, in the present world."""
        n, epoch, rank, size = self._begin(), self.epoch, self._rank(), self._size()
        order = Order(n, self.shuffle, self.seed)
        whole = self._step_size(size)
        for begin in range(self.consumed, n, whole):
            end = min(begin + whole, n)
            if self.drop_last and end - begin < whole:
                return
            self._require_length(epoch, n)
            count, most = share(end - begin, rank, size), share(end - begin, 0, size)
            pieces = -(-most // (self.micro_batch_size or most))  # on each rank: a script may call a collective in each
            indices = order.indices(epoch, begin + rank, count, size).tolist()
            for piece in range(pieces):
                part, stop = indices[piece::pieces], end if piece == pieces - 1 else None
                if part:
                    yield _Part(part, size * len(part) / (end - begin), stop)
                else:
                    yield _Part(order.indices(epoch, begin, 1).tolist(), 0.0, stop)


def _check_options(options: dict[str, Any]) -> None:
    """Raise UsageError for an option of DataLoader with which samples would be lost or repeated."""
    for name in _OURS:
        if options.pop(name, None) is not None:
            raise UsageError(f"{name}= cannot be given, because ElasticDataLoader orders the samples. Remove it.")
    if not options.get("in_order", True) and options.get("num_workers"):
        raise UsageError(
            "in_order=False cannot be given with num_workers=, because a commit counts the batches in their order: "
            "after a restore, samples would be lost and others repeated. Remove it."
        )
    if unknown := sorted(options.keys() - set(_THEIRS)):
        raise UsageError(
            f"{unknown[0]}= is no option that ElasticDataLoader can pass on to torch's DataLoader. Remove it, or give "
            f"one of these: {', '.join(_THEIRS)}."
        )


# -------------------------------------------------------------------------------------------------------- iterable data
# Data loaders, samplers and other objects with iterators, as values of a state.


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
