"""Reducer: sums gradients over all ranks during the backward pass, with a hook on each parameter, and buckets.

A bucket starts when its last gradient is complete, and never before the previous bucket. So all ranks start their
collectives in one order, whatever the order of their gradients. ``synchronize`` starts the remaining buckets, and
waits.

All ranks must reduce the same parameters, and agree on them in each ``synchronize``. In the first step of a world they
have not agreed yet, so the buckets of that step start only in ``synchronize``.

A running reduction belongs to one world. It is dropped in another world, and when a collective fails.
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

from elasticstate.extension import world_generation
from elasticstate.horovod import calls, headers
from elasticstate.horovod.buckets import Bucket, plan
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.compression import Compressor
from elasticstate.horovod.failures import CallUsageError, OptimizerUsageError
from elasticstate.horovod.members import Members
from elasticstate.horovod.process_sets import ProcessSet, is_member, members_of
from elasticstate.horovod.reduction import Op
from elasticstate.horovod.sparse import SparseGradients

_all: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()  # by number: the newest comes last
_numbers = itertools.count()
_hooks: Any = WeakIdKeyDictionary()  # parameter -> its hook: only the newest reducer of a parameter counts


class Reducer:
    """Reducer of one optimizer's parameters.

    Args:
        op: Average or Sum.
        predivide: with Average, divide by this number before the sum, and by size() / predivide after it.
        compression: compressor for the gradients that are sent.
        passes: number of backward passes that make one gradient.
        sparse_as_dense: convert sparse gradients to dense ones; otherwise their entries are gathered.
        names: names of parameters by id, for messages.
        process_set: ranks that reduce; None: all. On another rank, gradients stay as they are.
    """

    def __init__(
        self,
        op: Op,
        predivide: float,
        compression: type[Compressor],
        passes: int,
        sparse_as_dense: bool,
        names: dict[int, str],
        process_set: ProcessSet | None = None,
    ) -> None:
        self.passes = passes
        self._op = op
        self._predivide = predivide
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self.names = names
        self._process_set = process_set
        self._members: Members | None = None  # of the pending gradients
        self._sparse = SparseGradients(op, process_set)
        self._buckets: list[Bucket] = []
        self._left: dict[int, int] = {}  # id of a parameter -> passes until its gradient is complete
        self._launched = 0  # number of buckets
        self._pending = False
        self._is_reduced = False
        self._may_launch = False  # before ``synchronize``
        self._agreed: tuple[int, int] | None = None  # generation and digest of the call that all ranks agree on
        self._described: tuple[object, Call] | None = None  # the description, after the key that it depends on
        _all[next(_numbers)] = self

    # ------------------------------------------------------------------------------------------------------- parameters

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add the parameters that require gradients and are new. Their buckets come last."""
        new = {id(p): p for p in parameters if p.requires_grad and id(p) not in self._left}
        for group in plan(list(new.values())):
            bucket = Bucket(group, f"gradients {len(self._buckets)}")
            self._buckets.append(bucket)
            for parameter in group:
                self._left[id(parameter)] = self.passes
                _hook(parameter, functools.partial(_on_gradient, weakref.ref(self), bucket))

    def call(self) -> Call:
        """Return the reduction of one step. If it differs between ranks, they do not train the same model."""
        likes = [bucket.parameters[0] for bucket in self._buckets if bucket.parameters]
        key = self.passes, len(self._sparse), [(like.dtype, like.device.type) for like in likes]
        if self._described is None or self._described[0] != key:
            self._described = key, self._describe()
        return self._described[1]

    def _describe(self) -> Call:
        how = calls.signature(
            "DistributedOptimizer",
            None,
            op=self._op.value,
            gradient_predivide_factor=self._predivide if self._predivide != 1.0 else None,
            compression=getattr(self._compression, "__name__", type(self._compression).__name__).lstrip("_"),
            backward_passes_per_step=self.passes,
        )
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        names = [self.names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
        lines = [f"{name}: {calls.form(p)}" for name, p in zip(names, parameters, strict=True)]
        lines += [f"sparse gradients of {self._name(id(p))}: {calls.form(p)}" for p in self._sparse]
        return Call(CallKind.STEP, (f"a step of {how}", *lines))

    # -------------------------------------------------------------------------------------------------------- reduction

    @property
    def pending(self) -> bool:
        """True if there are gradients in this world that are not reduced yet."""
        return self._pending and self._is_present

    @property
    def is_reduced(self) -> bool:
        """True if no gradient was added since the last reduction."""
        return self._is_reduced and self._is_present

    @property
    def reduces(self) -> bool:
        """True if this worker's rank takes part."""
        return is_member(self._process_set)

    @property
    def _is_present(self) -> bool:
        return self._members is not None and self._members.generation == world_generation()

    def stepped(self) -> None:
        """Mark the reduced gradients as used."""
        self._is_reduced = False

    def synchronize(self) -> None:
        """Reduce the remaining buckets, and wait until all gradients are reduced over the world.

        Raises UsageError, on all ranks, if they do not reduce the same parameters, and the errors of a collective. No
        gradients are pending afterwards.
        """
        if not self.reduces:
            self._is_reduced = True
            return
        try:
            members = self._members if self.pending else None
            if members is None:
                members = self._begin()
            headers.agree(self.call(), members)
            self._agreed = members.generation, self.call().digest
            for bucket in self._buckets[self._launched :]:
                self._launch(bucket, members)
            factor = 1.0 if self._op is Op.SUM else self._predivide / members.size
            for bucket in self._buckets:
                bucket.finish(factor, self._compression)
            self._sparse.reduce()
        except BaseException:
            self.drop()
            raise
        for bucket in self._buckets:
            bucket.reset()
        self._settle()
        self._is_reduced = True

    def take_part(self) -> None:
        """Take part in the others' reduction with zeros. Raises the errors of a collective."""
        self.drop()
        members = members_of(self._process_set)
        try:
            for bucket in self._buckets:
                bucket.launch_nothing(self._compression, members)
            for bucket in self._buckets:
                bucket.wait()
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget pending gradients and running collectives."""
        for bucket in self._buckets:
            bucket.drop()
        self._settle()

    def _settle(self) -> None:
        self._left = dict.fromkeys(self._left, self.passes)
        self._launched = 0
        self._pending = self._is_reduced = False

    def _begin(self) -> Members:
        """Begin a reduction: at the first gradient in this world since the last one. Return those who take part."""
        if self._pending:
            self.drop()  # left over from an ended world
        self._members = members = members_of(self._process_set)
        self._pending, self._is_reduced = True, False
        self._may_launch = members.size == 1 or self._agreed == (members.generation, self.call().digest)
        return members

    @property
    def _next(self) -> Bucket:
        return self._buckets[self._launched]

    def _launch(self, bucket: Bucket, members: Members) -> None:
        bucket.launch(1.0 / self._predivide, self._compression, members)
        self._launched += 1

    def count_pass(self, parameter: torch.Tensor, bucket: Bucket) -> None:
        """Record that a backward pass has added to the gradient of ``parameter``."""
        if not self.reduces:
            return
        members = self._members if self.pending else None
        if members is None:
            members = self._begin()
        gradient, key = parameter.grad, id(parameter)
        if gradient is not None and gradient.is_sparse:
            if self._sparse_as_dense:
                parameter.grad = gradient.to_dense()
            elif parameter not in self._sparse:
                self._sparse.add(parameter)
                bucket.remove(parameter)
        self._left[key] -= 1
        if self._left[key] == 0:
            if parameter not in self._sparse:
                bucket.incomplete -= 1
            while self._may_launch and self._launched < len(self._buckets) and not self._next.incomplete:
                self._launch(self._next, members)
        elif self._left[key] < 0:
            raise OptimizerUsageError(
                f"{self._name(key)} received gradients from more than backward_passes_per_step={self.passes} passes "
                f"since the last step(). Set backward_passes_per_step to the number of passes before each step."
            )

    def _name(self, key: int) -> str:
        return self.names.get(key, "a parameter")


def drop_all() -> None:
    """Drop the running collectives of all reducers when the world is left. They would keep the world's sockets open."""
    for reducer in list(_all.values()):
        reducer.drop()


def reducer_of(digest: int) -> Reducer:
    """Return the newest reducer whose call has this digest. Raises UsageError when there is none."""
    for _, reducer in sorted(_all.items(), reverse=True):
        if reducer.call().digest == digest:
            return reducer
    raise CallUsageError(
        "join(): another rank steps a DistributedOptimizer that does not exist on this rank. Create the same "
        "optimizers on all ranks."
    )


def _on_gradient(reference: weakref.ref[Reducer], bucket: Bucket, parameter: torch.Tensor) -> None:
    reducer = reference()
    if reducer is None:
        return
    try:
        reducer.count_pass(parameter, bucket)
    except BaseException:
        reducer.drop()
        raise


def _hook(parameter: torch.Tensor, hook: functools.partial[None]) -> None:
    before: RemovableHandle | None = _hooks.get(parameter)
    if before is not None:
        before.remove()
    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
