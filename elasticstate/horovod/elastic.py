"""``hvd.elastic``: elasticstate under Horovod's names and signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sized
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import Sampler

from elasticstate.errors import UsageError
from elasticstate.horovod import headers, world
from elasticstate.horovod.reducer import drop_all
from elasticstate.state import sampler as plain
from elasticstate.state.base import State as PlainState
from elasticstate.state.objects import ObjectState as PlainObjectState
from elasticstate.state.order import Order, world_rank, world_size
from elasticstate.state.torch import TorchState as PlainTorchState
from elasticstate.worker import run as worker

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

P = ParamSpec("P")
R = TypeVar("R")


def run(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function(state, ...)`` elastic: see ``elasticstate.run``."""

    @functools.wraps(function)
    def in_one_world(*args: P.args, **kwargs: P.kwargs) -> R:
        state = args[0]
        assert isinstance(state, PlainState), "elasticstate.run has looked"
        headers.use(state)
        try:
            if world.is_initialized():
                world.ready()
            return function(*args, **kwargs)
        finally:
            drop_all()
            headers.use(None)

    return worker.run(in_one_world)


class State(PlainState):
    """For a kind of state of your own: see ``elasticstate.State``."""

    def check_host_updates(self) -> None:
        headers.tick_comes()
        super().check_host_updates()


class ObjectState(State, PlainObjectState):
    """Plain values: see ``elasticstate.ObjectState``. The first two arguments are there for old scripts."""

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: Any) -> None:
        super().__init__(**values)


class TorchState(State, PlainTorchState):
    """Model, optimizer and whatever else: see ``elasticstate.TorchState``."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)


class ElasticSampler(Sampler[int]):
    """Samples what is left of an epoch, over all ranks of the present world: equally many on each.

    What was recorded before a commit is not sampled again in the same epoch, also in another world. If the rest cannot
    be shared out evenly, some ranks get one sample that others have, too. All that is kept is how much the world has
    consumed, so record each batch, in the order in which they come.

    Args:
        dataset: anything with a length.
        shuffle: in an order drawn from seed and epoch.
        seed: 0 to 2**64 - 1.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._plain = plain.ElasticSampler(dataset, shuffle=shuffle, seed=seed, rank=_rank, size=_size)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``. Nothing happens if the sampler is in it already."""
        self._plain.set_epoch(epoch)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as consumed, of ``batch_size`` samples on *each* rank. ``batch_idx`` is not looked at."""
        self._plain.record_batch(batch_size * _size())

    def record_indices(self, indices: list[int]) -> None:
        """Count these samples as consumed, and as many on each other rank.

        Raises UsageError if they are not the next ones of this rank.
        """
        wanted = [self._sample(self._plain.consumed, i) for i in range(len(indices) if self._remaining else 0)]
        if sorted(wanted) != sorted(int(i) for i in indices):
            raise UsageError("record_indices: these are not the next samples of this rank: record all, in their order")
        self._plain.record_batch(len(indices) * _size())

    def reset(self) -> None:
        """Nothing to do: each ``iter()`` shares out the rest over the world of that moment."""

    @property
    def epoch(self) -> int:
        return self._plain.epoch

    @property
    def processed_indices(self) -> set[int]:
        """Raises UsageError: they are not kept one by one."""
        raise UsageError(
            "ElasticSampler keeps how many samples the world has consumed, not which: state_dict()['consumed']"
        )

    def state_dict(self) -> dict[str, Any]:
        return self._plain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._plain.load_state_dict(state_dict)

    def __iter__(self) -> Iterator[int]:
        own, padded = len(self._plain), len(self)
        last = [self._sample(self._plain.consumed, own)] if own < padded else []
        yield from self._plain
        yield from last

    def __len__(self) -> int:
        """How many indices ``iter()`` would give now, the same on all ranks."""
        return -(-self._remaining // _size())

    @property
    def _remaining(self) -> int:
        return len(self._plain.dataset) - self._plain.consumed

    def _sample(self, start: int, i: int) -> int:
        """The one that this rank takes as its i-th behind ``start``; behind the end it goes on at ``start``."""
        order = Order(len(self._plain.dataset), self._plain.shuffle, self._plain.seed)
        position = start + (_rank() + i * _size()) % (len(self._plain.dataset) - start)
        return int(order.indices(self._plain.epoch, position, 1))


def _rank() -> int:
    return world.rank() if world.is_initialized() else world_rank()


def _size() -> int:
    return world.size() if world.is_initialized() else world_size()
