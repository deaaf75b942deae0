"""ElasticDataLoader: batches for the present world; every sample of an epoch counts exactly once, whatever happens."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from elasticstate.errors import UsageError
from elasticstate.state.order import Order, share, world_generation, world_rank, world_size

_OURS = ("sampler", "batch_sampler", "generator")


class _Part(NamedTuple):
    """One batch of this rank."""

    indices: list[int]
    weight: float
    trained: int | None  # samples of the epoch that are trained when it is; None: others of the same step follow


class _Parts:
    """What the DataLoader below draws its batches from. ``plan`` receives those that it has drawn ahead."""

    def __init__(self, parts: Callable[[], Iterator[_Part]]) -> None:
        self.plan: deque[_Part] = deque()
        self._parts = parts

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan = deque()
        for part in self._parts():
            plan.append(part)
            yield part.indices


class _Synchronized(Protocol):
    """What DDP and FSDP offer for gradients that are accumulated."""

    def no_sync(self) -> AbstractContextManager[Any]: ...


class ElasticDataLoader:
    """Iterates over the batches that this rank has to train in the rest of the epoch::

        loader = elastic.ElasticDataLoader(dataset, batch_size=64)
        state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

        @elastic.run
        def train(state):
            model = DistributedDataParallel(state.model)
            for epoch in state.loader.epochs(20):
                for inputs, targets in state.loader:
                    ...
                    state.commit()

    Nothing else is to be kept in mind. The loader is a value of the state: what it has handed out when a commit is made
    is trained in that commit, and what was fetched ahead is not. After a death, or in another world, ``train`` runs
    again and each ``for`` over the loader goes on where the commit stands. So end the tick (``commit``,
    ``check_host_updates``) after the batch in hand is trained, not before.

    Its state is (epoch, consumed, seed), of the same few bytes however many samples there are, and no collective runs.

    The batch is either of one rank, and the world's is as many times as large as the world; or, with
    ``global_batch_size``, the world's: then step i trains the same samples whatever the size of the world, so that the
    loss follows the same curve. Each step's samples are shared out as evenly as they can be. Where shares differ (at
    the end of an epoch; or 64 samples on 5 ranks), the plain mean of a DDP gradient over ranks is not the mean over
    samples any more; multiply the mean loss by ``weight``, and it is::

        loss = criterion(model(inputs), targets) * state.loader.weight

    A rank for which no sample is left gets one of another rank with weight 0, as DDP wants each rank to take part.

    With ``micro_batch_size`` a share that is larger comes in several batches of one step. Then::

        for inputs, targets in state.loader:
            with state.loader.accumulate(model):
                (criterion(model(inputs), targets) * state.loader.weight).backward()
            if state.loader.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                state.commit()

    Args:
        dataset: with a length and indices. (One that can only be iterated over has a position of its own: put a
            ``torchdata.stateful_dataloader.StatefulDataLoader`` into the state instead.)
        batch_size: samples for each rank in one step.
        global_batch_size: samples for all ranks together in one step; one of the two has to be given.
        micro_batch_size: samples in one batch, at most; with ``global_batch_size``.
        shuffle: in an order drawn from seed and epoch; otherwise from first to last.
        seed: 0 to 2**64 - 1.
        drop_last: leave out the last samples if they are fewer than a whole step takes.
        rank, size: asked at each ``iter()``; by default those of the present world, 0 and 1 outside one.
        options: for ``torch.utils.data.DataLoader``: num_workers, collate_fn, pin_memory, ...

    Raises:
        UsageError: an argument cannot be used as it is; the message says which, and what to do.
    """

    weight: float
    """By which the mean loss of the batch in hand is to be multiplied. 1 where all ranks have equally many samples."""

    step_ends: bool
    """Whether the batch in hand is the last one of its step."""

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
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"{type(dataset).__name__} has no length or no indices: ElasticDataLoader cannot share it out; put a "
                "torchdata.stateful_dataloader.StatefulDataLoader into the state instead"
            )
        if (batch_size is None) == (global_batch_size is None):
            raise UsageError("give ElasticDataLoader either batch_size= or global_batch_size=")
        if micro_batch_size is not None and global_batch_size is None:
            raise UsageError("micro_batch_size= goes with global_batch_size=: a batch_size= is as large as it is")
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: takes at least 1")
        if taken := [name for name in _OURS if name in options]:
            raise UsageError(f"{taken[0]}= is ElasticDataLoader's own: it decides which samples come, and when")
        Order(len(dataset), shuffle, seed)  # refuses a bad seed
        self.dataset = dataset
        self.batch_size, self.global_batch_size, self.micro_batch_size = sizes.values()
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.consumed = 0
        self.weight, self.step_ends = 1.0, True
        self._rank, self._size = rank, size
        self._over_in: int | None = None  # the generation in which a ``for`` has come to the end of this epoch
        self._changes = 0  # of the position, other than by iterating
        self._batches = _Parts(self._parts)
        self._random = torch.Generator()
        options |= {"batch_sampler": self._batches, "generator": self._random}
        self._loader: DataLoader[Any] = DataLoader(dataset, **options)  # type: ignore[arg-type]

    # ---------------------------------------------------------------------------------------------------- the epochs

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``. Nothing happens if the loader is in it already: it goes on where it was restored to."""
        if epoch != self.epoch:
            self._go_to(epoch, 0)

    def epochs(self, number: int) -> Iterator[int]:
        """From the present epoch to ``number - 1``; each is begun when it is reached."""
        while self.epoch < number:
            yield self.epoch
            self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        """Steps that are left of the epoch in the present world."""
        left, whole = len(self.dataset) - self.consumed, self._step_size(self._size())
        return left // whole if self.drop_last else -(-left // whole)

    def __iter__(self) -> Iterator[Any]:
        if self._over_in == world_generation():
            raise UsageError(
                f"epoch {self.epoch} is over: begin the next one, by 'for epoch in loader.epochs(n)' or "
                f"loader.set_epoch({self.epoch + 1})"
            )
        changes = self._changes
        self._random.manual_seed(self._seed_of_fetching())
        for batch in self._loader:
            if self._changes != changes:
                raise UsageError("the loader was restored, or given another epoch, in a 'for' over it: begin a new one")
            _, self.weight, trained = self._batches.plan.popleft()
            self.step_ends = trained is not None
            if trained is not None:
                self.consumed = trained
            yield batch
        if self._changes == changes:
            self._over_in = world_generation()

    def accumulate(self, model: nn.Module | _Synchronized) -> AbstractContextManager[Any]:
        """For the backward pass of a batch: only with the last batch of a step are gradients exchanged.

        ``model``: what has ``no_sync()``, as DDP and FSDP do; others exchange nothing.
        """
        no_sync = getattr(model, "no_sync", None)
        return nullcontext() if self.step_ends or no_sync is None else no_sync()

    # ----------------------------------------------------------------------------------------------------- the state

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "consumed": self.consumed, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed = state_dict["seed"]
        self._go_to(state_dict["epoch"], state_dict["consumed"])

    def _go_to(self, epoch: int, consumed: int) -> None:
        self.epoch, self.consumed = epoch, consumed
        self._over_in = None
        self._changes += 1

    # ---------------------------------------------------------------------------------------------------- the shares

    def _seed_of_fetching(self) -> int:
        """What the DataLoader's processes derive their random numbers from: a function of where the epoch goes on."""
        where = f"{self.seed}/{self.epoch}/{self.consumed}/{self._rank()}"
        return int.from_bytes(hashlib.blake2b(where.encode(), digest_size=7).digest(), "little")

    def _step_size(self, size: int) -> int:
        return self.global_batch_size or (self.batch_size or 1) * size

    def _parts(self) -> Iterator[_Part]:
        """This rank's batches of the rest of the epoch, in the world of this moment."""
        n, epoch, rank, size = len(self.dataset), self.epoch, self._rank(), self._size()
        order = Order(n, self.shuffle, self.seed)
        whole = self._step_size(size)
        for begin in range(self.consumed, n, whole):
            end = min(begin + whole, n)
            if self.drop_last and end - begin < whole:
                return
            count = share(end - begin, rank, size)
            if count:
                indices = order.indices(epoch, begin + rank, count, size).tolist()
                yield from self._micro(indices, size / (end - begin), end)
            else:
                yield _Part(order.indices(epoch, begin, 1).tolist(), 0.0, end)

    def _micro(self, indices: list[int], weight: float, end: int) -> Iterator[_Part]:
        """``weight``: of one sample. Batches of one step differ by a sample at most."""
        pieces = -(-len(indices) // (self.micro_batch_size or len(indices)))
        for piece in range(pieces):
            part = indices[piece::pieces]
            yield _Part(part, weight * len(part), end if piece == pieces - 1 else None)
