"""DistributedOptimizer: an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from elasticstate.extension import copy_all, world_generation
from elasticstate.horovod import calls, negotiation, timeline
from elasticstate.horovod.allreduce import Op, scale, torch_operation
from elasticstate.horovod.calls import Call, CallKind, CallUsageError, Members, OptimizerUsageError, failures_named
from elasticstate.horovod.collectives import sparse_allreduce_async
from elasticstate.horovod.compression import Compression, Compressor
from elasticstate.horovod.world import ProcessSet, members_of, need_process_set

# -------------------------------------------------------------------------------------------------------------- buckets
# Buckets: gradients that are sent together, because many small collectives cost more than few large ones.
#
# The plan is that of DistributedDataParallel: parameters in reverse order, as backward reaches them; a small first
# bucket, so that communication starts early; then large buckets.


FIRST_BYTES, BYTES = 1 << 20, 25 << 20
_LARGE = 1 << 16  # elements: if gradients have more, one more pass over the memory costs more than a call for each


def plan(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide parameters into buckets of one dtype and device each, in the order in which they are reduced."""
    full: list[list[torch.Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    remaining_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, []).append(parameter)
        remaining_bytes[kind] = remaining_bytes.get(kind, FIRST_BYTES) - parameter.nbytes
        if remaining_bytes[kind] <= 0:
            remaining_bytes[kind] = BYTES
            full.append(filling.pop(kind))
    return full + list(filling.values())


class Bucket:
    """Parameters whose gradients are copied into one tensor, which is summed over all ranks.

    ``name``: its row in the timeline.
    """

    def __init__(self, parameters: list[torch.Tensor], name: str) -> None:
        self._call = Call(CallKind.ALLREDUCE, ("allreduce",), name=name)
        self._span: timeline.Span | None = None
        self.parameters = parameters
        self.incomplete = len(parameters)  # gradients that are not complete yet
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._sent: torch.Tensor | None = None
        self._context: Any = None
        self._work: Any = None

    def reset(self) -> None:
        """Forget all gradients of the last step."""
        self.incomplete = len(self.parameters)
        self._sent = self._context = self._work = None

    def remove(self, parameter: torch.Tensor) -> None:
        """Remove a parameter whose gradient was incomplete, before ``launch``."""
        self.parameters = [p for p in self.parameters if p is not parameter]
        self.incomplete -= 1
        self._flat = None

    def drop(self) -> None:
        """Reset, and also replace the tensor, because a running collective may still write into it."""
        self.reset()
        self._flat = None

    def launch(
        self, factor: float, compression: type[Compressor], members: Members, has_gradients: bool = True
    ) -> None:
        """Start the sum. Parameters without a gradient count as zeros. A bucket without parameters does nothing.

        ``has_gradients``: False on a rank that has joined, whose gradients are old.
        """
        if not self.parameters:
            return
        flat, given = self._buffer(), []
        if has_gradients:
            given = [(v, p.grad) for v, p in zip(self._views, self.parameters, strict=True) if p.grad is not None]
        with torch.no_grad():
            if len(given) < len(self._views):
                flat.zero_()
            if given:
                copy_all([view for view, _ in given], [gradient for _, gradient in given])
            scale(flat, factor)
            self._sent, self._context = compression.compress(flat)
        self._span = timeline.exchange(self._call, self._sent)
        self._work = dist.all_reduce(self._sent, group=members.lane, async_op=True)

    def wait(self) -> None:
        """Wait for the sum. Raises the collective's error."""
        if self.parameters:
            with failures_named():
                self._work.wait()
            timeline.end(self._span)

    def finish(self, factor: float, compression: type[Compressor]) -> None:
        """Wait for the sum, and copy it to the gradients. Raises the collective's error."""
        if not self.parameters:
            return
        self.wait()
        assert self._sent is not None, "it was started"
        with torch.no_grad():
            flat, sent = self._buffer(), compression.decompress(self._sent, self._context)
            if sent.data_ptr() != flat.data_ptr():
                flat.copy_(sent)
            given = []
            for view, parameter in zip(self._views, self.parameters, strict=True):
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad is not None:
                    given.append((parameter.grad, view))
            _copy_scaled(given, flat, factor)

    def _buffer(self) -> torch.Tensor:
        """Return one tensor for all gradients, with a view for each. Made again after a model was moved or cast."""
        like, flat = self.parameters[0], self._flat
        if flat is None or flat.device != like.device or flat.dtype != like.dtype:
            self._flat = flat = torch.empty(
                sum(p.numel() for p in self.parameters), dtype=like.dtype, device=like.device
            )
            parts = torch.split(flat, [p.numel() for p in self.parameters])
            self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        return flat


def _copy_scaled(given: list[tuple[torch.Tensor, torch.Tensor]], flat: torch.Tensor, factor: float) -> None:
    """Copy to each gradient its view of ``flat``, multiplied by ``factor``."""
    if factor != 1.0 and flat.device.type == "cpu" and flat.numel() >= _LARGE * len(given):
        for gradient, view in given:
            torch.mul(view, factor, out=gradient)
        return
    scale(flat, factor)
    copy_all([gradient for gradient, _ in given], [view for _, view in given])


# -------------------------------------------------------------------------------------------------------------- reducer
# Reducer: sums gradients over all ranks during the backward pass, with a hook on each parameter, and buckets.
#
# A bucket starts when its last gradient is complete, and never before the previous bucket. So all ranks start their
# collectives in one order, whatever the order of their gradients. ``synchronize`` starts the remaining buckets, and
# waits.
#
# All ranks must reduce the same parameters, and agree on them in each ``synchronize``. In the first step of a world
# they have not agreed yet, so the buckets of that step start only in ``synchronize``.
#
# A running reduction belongs to one world. It is dropped in another world, and when a collective fails.


_all: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()  # by number: the newest comes last
_numbers = itertools.count()
_hooks: Any = WeakIdKeyDictionary()  # parameter -> its hook: only the newest reducer of a parameter counts


@dataclass(eq=False)
class Reducer:
    """Reducer of one optimizer's parameters."""

    op: Op  # Average or Sum
    predivide: float  # with Average, divide by this number before the sum, and by size() / predivide after it
    compression: type[Compressor]
    passes: int  # number of backward passes that make one gradient
    sparse_as_dense: bool  # else the entries of sparse gradients are gathered
    names: dict[int, str]  # of parameters by id, for messages
    process_set: ProcessSet | None = None  # ranks that reduce; None: all. On another rank, gradients stay as they are

    def __post_init__(self) -> None:
        self._members: Members | None = None  # of the pending gradients
        # Parameters with sparse gradients (``nn.Embedding(sparse=True)``), by id, each with the number of its sparse
        # dimensions. They have no buckets, and are reduced in ``synchronize``.
        self._sparse: dict[int, tuple[torch.Tensor, int]] = {}
        self._buckets: list[Bucket] = []
        self._left: dict[int, int] = {}  # id of a parameter -> passes until its gradient is complete
        self._launched = 0  # number of buckets
        self._pending = False
        self._is_reduced = False
        self._may_launch = False  # before ``synchronize``
        self._agreed: tuple[int, int] | None = None  # generation and digest of the call that all ranks agree on
        self._described: tuple[object, Call] | None = None  # the description, after the key that it depends on
        _all[next(_numbers)] = self

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
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
            op=self.op.value,
            gradient_predivide_factor=self.predivide if self.predivide != 1.0 else None,
            compression=getattr(self.compression, "__name__", type(self.compression).__name__).lstrip("_"),
            backward_passes_per_step=self.passes,
        )
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        names = [self.names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]
        lines = [f"{name}: {calls.form(p)}" for name, p in zip(names, parameters, strict=True)]
        sparse = [(self.names.get(key, "a parameter"), p) for key, (p, _) in self._sparse.items()]
        lines += [f"sparse gradients of {name}: {calls.form(p)}" for name, p in sparse]
        return Call(CallKind.STEP, (f"a step of {how}", *lines))

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
        """True if this worker's rank takes part. Joins the world."""
        return self.process_set is None or bool(self.process_set.included())

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
            members = self._begin()
            negotiation.agree(self.call(), members)
            self._agreed = members.generation, self.call().digest
            for bucket in self._buckets[self._launched :]:
                self._launch(bucket, members)
            factor = 1.0 if self.op is Op.SUM else self.predivide / members.size
            for bucket in self._buckets:
                bucket.finish(factor, self.compression)
            sparse = [
                (p, sparse_allreduce_async(_sparse_gradient(p, dimensions), None, self.op, self.process_set))
                for p, dimensions in self._sparse.values()
            ]
            for parameter, handle in sparse:
                parameter.grad = handle.wait().coalesce()
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
        members = members_of(self.process_set)
        try:
            for bucket in self._buckets:
                bucket.launch(1.0, self.compression, members, has_gradients=False)
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
        """Begin a reduction at the first gradient in this world since the last one. Return those who take part."""
        if self._members is not None and self.pending:
            return self._members
        if self._pending:
            self.drop()  # left over from an ended world
        self._members = members = members_of(self.process_set)
        self._pending, self._is_reduced = True, False
        self._may_launch = members.size == 1 or self._agreed == (members.generation, self.call().digest)
        return members

    def _launch(self, bucket: Bucket, members: Members) -> None:
        bucket.launch(1.0 / self.predivide, self.compression, members)
        self._launched += 1

    def count_pass(self, parameter: torch.Tensor, bucket: Bucket) -> None:
        """Record that a backward pass has added to the gradient of ``parameter``."""
        if not self.reduces:
            return
        members = self._begin()
        gradient, key = parameter.grad, id(parameter)
        if gradient is not None and gradient.is_sparse:
            if self.sparse_as_dense:
                parameter.grad = gradient.to_dense()
            elif key not in self._sparse:
                self._sparse[key] = parameter, gradient.sparse_dim()
                bucket.remove(parameter)
        self._left[key] -= 1
        if self._left[key] == 0:
            if key not in self._sparse:
                bucket.incomplete -= 1
            while self._may_launch and (rest := self._buckets[self._launched :]) and not rest[0].incomplete:
                self._launch(rest[0], members)
        elif self._left[key] < 0:
            raise OptimizerUsageError(
                f"{self.names.get(key, 'a parameter')} received gradients from more than "
                f"backward_passes_per_step={self.passes} passes since the last step(). Set backward_passes_per_step to "
                "the number of passes before each step."
            )


def _sparse_gradient(parameter: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return the gradient with so many sparse dimensions. A missing one counts as zeros."""
    if parameter.grad is None:
        indices = torch.empty(dimensions, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty(0, *parameter.shape[dimensions:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True, device=values.device)
    return parameter.grad.to_sparse(dimensions) if parameter.grad.layout is torch.strided else parameter.grad


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


O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
_OWN = {"step", "_plain", "_reducer", "_must_reduce", "_is_synchronized"}
_NEEDS_CONTEXT = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). It does not "
    "reduce the gradients again, but Horovod does. Write: with optimizer.skip_synchronize(): optimizer.step()"
)


def DistributedOptimizer(
    optimizer: O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
) -> O:
    """Return an optimizer of the same class that reduces gradients over all ranks.

    It shares the parameter groups and the state of ``optimizer``. Gradients are reduced in buckets during ``backward``,
    and ``step()`` waits for them. ``synchronize()`` waits earlier, for example to clip gradients; the next ``step()``
    does not reduce again. All ranks must make the same steps. A parameter without a gradient on this rank counts as
    zeros, and gets the mean of all. Schedulers, GradScaler and states accept either of the two optimizers. A later
    DistributedOptimizer of the same parameters replaces this one.

    Args:
        named_parameters: names for messages; if given, they must cover all parameters.
        compression: compressor for the gradients that are sent.
        backward_passes_per_step: number of passes that add up to the gradients of a step.
        op: Average or Sum.
        gradient_predivide_factor: f: divide by f before the sum, and by size() / f after it. Only with Average.
        num_groups, groups: ignored, because gradients are always grouped in buckets. ``groups`` is only checked.
        sparse_as_dense: convert sparse gradients to dense ones; otherwise their entries are gathered in ``step``.
        process_set: ranks that take part; None: all. Any other rank steps with its own gradients.

    Raises:
        ValueError: names are missing or repeated.
        UsageError: any other invalid argument.
    """
    need_process_set(process_set)
    torch_operation(op)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerUsageError(f"DistributedOptimizer({type(optimizer).__name__}): must be a torch.optim.Optimizer")
    if isinstance(optimizer, _Distributed):
        raise OptimizerUsageError("the optimizer is a DistributedOptimizer already. Wrap each optimizer once.")
    if op not in (Op.AVERAGE, Op.SUM):
        raise OptimizerUsageError(f"op={op.value}: must be Average or Sum. No other operation reduces gradients.")
    if gradient_predivide_factor != 1.0 and op is not Op.AVERAGE:
        raise OptimizerUsageError(
            f"gradient_predivide_factor={gradient_predivide_factor:g} requires op=Average. Leave it out with "
            f"op={op.value}."
        )
    if backward_passes_per_step < 1:
        raise OptimizerUsageError(f"backward_passes_per_step={backward_passes_per_step}: must be at least 1")
    _check_groups(groups)
    names = _names(optimizer, named_parameters)
    factor, passes = gradient_predivide_factor, backward_passes_per_step
    reducer = Reducer(op, factor, compression, passes, sparse_as_dense, names, process_set)
    kind = type(optimizer)
    distributed: Any = object.__new__(type(f"Distributed{kind.__name__}", (_Distributed, kind), {}))
    distributed._plain = optimizer
    distributed._reducer = reducer
    distributed._must_reduce = True
    distributed._is_synchronized = False
    reducer.add(_parameters(optimizer))
    return cast(O, distributed)


class _Distributed(torch.optim.Optimizer):
    """Everything except gradients belongs to the plain optimizer: other attributes are read and set there."""

    _plain: torch.optim.Optimizer
    _reducer: Reducer
    _must_reduce: bool
    _is_synchronized: bool  # by the script, since the last step

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter, as in Horovod; without a given name, by its place in the groups."""
        return {
            parameter: self._reducer.names.get(id(parameter), f"allreduce.noname.{i}.{j}")
            for i, group in enumerate(self._plain.param_groups)
            for j, parameter in enumerate(group["params"])
        }

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._plain, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OWN:
            object.__delattr__(self, name)
        else:
            delattr(self._plain, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plain.__setstate__(state)  # called by load_state_dict

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptimizerUsageError(
            "a DistributedOptimizer cannot be copied or pickled. Copy or pickle its state_dict()."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the remaining gradients, and step. A closure's gradients are reduced at each call of the closure.

        Raises UsageError, on all ranks, if their steps differ, and the errors of a collective.
        """
        if self._must_reduce and self._is_synchronized:
            warnings.warn(_NEEDS_CONTEXT, stacklevel=2)
        self._is_synchronized = False
        if closure is None:
            if self._must_reduce and not self._reducer.is_reduced:
                self._reduce()
            self._reducer.stepped()
            return self._plain.step()

        def reduced() -> Any:
            loss = closure()
            if self._must_reduce:
                self._reduce()
            return loss

        try:
            return self._plain.step(reduced)
        finally:
            self._reducer.stepped()

    def synchronize(self) -> None:
        """Reduce all gradients over the world: start the remaining buckets, and wait for all.

        Raises UsageError, on all ranks, if their steps differ, and the errors of a collective.
        """
        self._reduce()
        self._is_synchronized = True

    def _reduce(self) -> None:
        self._reducer.add(_parameters(self._plain))  # some parameters may have been frozen before
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which ``step()`` uses the gradients as they are."""
        self._must_reduce = False
        try:
            yield
        finally:
            self._must_reduce = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of passes that add up to the gradients of a step, from the next step on.

        Raises UsageError if ``passes`` is less than 1, or between ``backward`` and ``step``.
        """
        if passes < 1:
            raise OptimizerUsageError(f"set_backward_passes_per_step({passes}): must be at least 1")
        if self._reducer.pending:
            raise OptimizerUsageError(
                "set_backward_passes_per_step() was called between backward() and step(). Call it directly after "
                "step()."
            )
        self._reducer.passes = passes
        self._reducer.drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises UsageError between ``backward`` and ``step``, because it would lose gradients."""
        if self._reducer.pending:
            raise OptimizerUsageError(
                "zero_grad() was called between backward() and step(), while gradients are reduced. Call it after "
                "step(), or after synchronize()."
            )
        self._plain.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._plain.add_param_group(param_group)
        self._reducer.add(_parameters(self._plain))


def _check_groups(groups: object) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list) or not all(isinstance(group, list | tuple) for group in groups):
        raise OptimizerUsageError(f"groups={groups!r}: must be a number from 1 on, or a list of lists of parameters")
    parameters = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in parameters):
        raise OptimizerUsageError("groups: the lists must contain parameters only. Pass [[model.weight], ...].")
    if len(set(map(id, parameters))) < len(parameters):
        raise OptimizerUsageError("groups: a parameter is in them twice. Each parameter belongs to one group.")


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError("named_parameters: must be pairs of name and parameter. Pass model.named_parameters().")
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(
            f"named_parameters: repeated names: {', '.join(twice)}. Give each parameter a name of its own."
        )
    names = {id(parameter): name for name, parameter in pairs}
    nameless = sum(id(parameter) not in names for parameter in _parameters(optimizer))
    if nameless:
        raise ValueError(
            f"named_parameters: {nameless} parameters of the optimizer have no name. Pass the names of all its "
            "parameters."
        )
    return names
