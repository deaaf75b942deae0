"""Gradients are summed up over all ranks while backward goes on: a hook on each parameter, and buckets.

A bucket is started when its last gradient has come, and never before the one in front of it: so the collectives of all
ranks have one order, whatever order their gradients come in. ``synchronize`` starts the rest, and waits.

What is under way belongs to one world. In another one it is dropped, and so it is when a collective fails.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from elasticstate.errors import UsageError
from elasticstate.horovod import headers, world
from elasticstate.horovod.buckets import Bucket, plan
from elasticstate.horovod.compression import Compressor
from elasticstate.horovod.headers import Kind
from elasticstate.horovod.reduction import Op
from elasticstate.state.order import world_generation

_all: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()  # by number: the same on all ranks
_numbers = itertools.count()
_hooks: Any = WeakIdKeyDictionary()  # parameter -> its hook: the newest reducer of a parameter is the one that counts


class Reducer:
    """Of one optimizer's parameters.

    Args:
        op: Average or Sum.
        predivide: the part of an average's divisor that comes before the sum is made, of 1 / predivide.
        passes: how many backward passes make one gradient.
        sparse_as_dense: make sparse gradients dense; otherwise they are an error.
        names: of parameters, for messages.
    """

    def __init__(
        self,
        op: Op,
        predivide: float,
        compression: type[Compressor],
        passes: int,
        sparse_as_dense: bool,
        names: dict[int, str],
    ) -> None:
        self.passes = passes
        self._op = op
        self._predivide = predivide
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._names = names
        self._buckets: list[Bucket] = []
        self._left: dict[int, int] = {}  # id of a parameter -> passes until its gradient is complete
        self._launched = 0  # buckets
        self._generation = 0  # of what is pending
        self._pending = False
        self._is_reduced = False
        self.number = next(_numbers)
        _all[self.number] = self

    # ------------------------------------------------------------------------------------------- what is looked after

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look after those that want gradients and are new; their buckets come last."""
        new = {id(p): p for p in parameters if p.requires_grad and id(p) not in self._left}
        for group in plan(list(new.values())):
            bucket = Bucket(group)
            self._buckets.append(bucket)
            for parameter in group:
                self._left[id(parameter)] = self.passes
                _hook(parameter, functools.partial(_on_gradient, weakref.ref(self), bucket))

    # ---------------------------------------------------------------------------------------------- what happens to it

    @property
    def pending(self) -> bool:
        """Whether gradients have come in this world that are not reduced yet."""
        return self._pending and self._generation == world_generation()

    @property
    def is_reduced(self) -> bool:
        """Whether no gradient has come since they were reduced."""
        return self._is_reduced and self._generation == world_generation()

    def stepped(self) -> None:
        """What was reduced is used up."""
        self._is_reduced = False

    def synchronize(self) -> None:
        """Reduce what is left, and wait until all gradients are those of the world.

        Raises what a collective has raised; nothing is pending then.
        """
        try:
            if not self.pending:
                self._begin()
            headers.send(Kind.STEP, self.number)
            for bucket in self._buckets[self._launched :]:
                self._launch(bucket)
            factor = 1.0 if self._op is Op.SUM else self._predivide / world.size()
            for bucket in self._buckets:
                bucket.finish(factor, self._compression)
        except BaseException:
            self.drop()
            raise
        for bucket in self._buckets:
            bucket.reset()
        self._settle()
        self._is_reduced = True

    def take_part(self) -> None:
        """In the reduction of the others, with nothing. Raises what a collective has raised."""
        self.drop()
        try:
            for bucket in self._buckets:
                bucket.launch_nothing(self._compression)
            for bucket in self._buckets:
                bucket.wait()
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget what has come and what is under way."""
        for bucket in self._buckets:
            bucket.drop()
        self._settle()

    def _settle(self) -> None:
        self._left = dict.fromkeys(self._left, self.passes)
        self._launched = 0
        self._pending = self._is_reduced = False

    def _begin(self) -> None:
        """The first gradient in this world since the last reduction."""
        if self._pending:
            self.drop()  # of a world that is over
        self._generation = world.ready()
        self._pending, self._is_reduced = True, False

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch(1.0 / self._predivide, self._compression)
        self._launched += 1

    def came(self, parameter: torch.Tensor, bucket: Bucket) -> None:
        """A backward pass has added to the gradient of ``parameter``."""
        if not self.pending:
            self._begin()
        gradient, key = parameter.grad, id(parameter)
        if gradient is not None and gradient.is_sparse:
            if not self._sparse_as_dense:
                raise UsageError(f"the gradient of {self._name(key)} is sparse: give sparse_as_dense=True")
            parameter.grad = gradient.to_dense()
        self._left[key] -= 1
        if self._left[key] == 0:
            bucket.missing -= 1
            while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
                self._launch(self._buckets[self._launched])
        elif self._left[key] < 0:
            raise UsageError(
                f"{self._name(key)} got gradients more than backward_passes_per_step={self.passes} times since the "
                f"last step(): give backward_passes_per_step as many passes as there are before each step"
            )

    def _name(self, key: int) -> str:
        return self._names.get(key, "a parameter")


def drop_all() -> None:
    """What all reducers have under way, when the world is left: it would keep the world's sockets."""
    for reducer in list(_all.values()):
        reducer.drop()


def reducer_of(number: int) -> Reducer:
    """Raises UsageError when there is none: the ranks' scripts are not the same."""
    if number not in _all:
        raise UsageError("join(): another rank steps a DistributedOptimizer that this one has not made")
    return _all[number]


def _on_gradient(reference: weakref.ref[Reducer], bucket: Bucket, parameter: torch.Tensor) -> None:
    reducer = reference()
    if reducer is None:
        return
    try:
        reducer.came(parameter, bucket)
    except BaseException:
        reducer.drop()
        raise


def _hook(parameter: torch.Tensor, hook: functools.partial[None]) -> None:
    before: RemovableHandle | None = _hooks.get(parameter)
    if before is not None:
        before.remove()
    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
