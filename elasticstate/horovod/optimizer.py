"""DistributedOptimizer: an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from elasticstate.errors import UsageError
from elasticstate.horovod.compression import Compression, Compressor
from elasticstate.horovod.process_sets import ProcessSet, need_process_set
from elasticstate.horovod.reducer import Reducer
from elasticstate.horovod.reduction import Op, torch_operation

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
_OWN = {"step", "_plain", "_reducer", "_must_reduce"}


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
        num_groups, groups: ignored, because gradients are always grouped in buckets.
        sparse_as_dense: convert sparse gradients to dense ones; otherwise their entries are gathered in ``step``.
        process_set: ranks that take part; None: all. Any other rank steps with its own gradients.

    Raises:
        ValueError: names are missing or repeated.
        UsageError: any other invalid argument.
    """
    need_process_set(process_set)
    torch_operation(op)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"DistributedOptimizer({type(optimizer).__name__}): must be a torch.optim.Optimizer")
    if isinstance(optimizer, _Distributed):
        raise UsageError("the optimizer is a DistributedOptimizer already. Wrap each optimizer once.")
    if op not in (Op.AVERAGE, Op.SUM):
        raise UsageError(f"op={op.value}: must be Average or Sum. No other operation reduces gradients.")
    if gradient_predivide_factor != 1.0 and op is not Op.AVERAGE:
        raise UsageError(
            f"gradient_predivide_factor={gradient_predivide_factor:g} requires op=Average. Leave it out with "
            f"op={op.value}."
        )
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step={backward_passes_per_step}: must be at least 1")
    names = _names(optimizer, named_parameters)
    factor, passes = gradient_predivide_factor, backward_passes_per_step
    reducer = Reducer(op, factor, compression, passes, sparse_as_dense, names, process_set)
    kind = type(optimizer)
    distributed: Any = object.__new__(type(f"Distributed{kind.__name__}", (_Distributed, kind), {}))
    distributed._plain = optimizer
    distributed._reducer = reducer
    distributed._must_reduce = True
    reducer.adopt(_parameters(optimizer))
    return cast(O, distributed)


class _Distributed(torch.optim.Optimizer):
    """Everything except gradients belongs to the plain optimizer: other attributes are read and set there."""

    _plain: torch.optim.Optimizer
    _reducer: Reducer
    _must_reduce: bool

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
        raise UsageError("a DistributedOptimizer cannot be copied or pickled. Copy or pickle its state_dict().")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the remaining gradients, and step. A closure's gradients are reduced at each call of the closure.

        Raises UsageError, on all ranks, if their steps differ, and the errors of a collective.
        """
        if closure is None:
            if self._must_reduce and not self._reducer.is_reduced:
                self.synchronize()
            self._reducer.stepped()
            return self._plain.step()

        def reduced() -> Any:
            loss = closure()
            if self._must_reduce:
                self.synchronize()
            return loss

        try:
            return self._plain.step(reduced)
        finally:
            self._reducer.stepped()

    def synchronize(self) -> None:
        """Reduce all gradients over the world: start the remaining buckets, and wait for all.

        Raises UsageError, on all ranks, if their steps differ, and the errors of a collective.
        """
        self._reducer.adopt(_parameters(self._plain))  # some parameters may have been frozen before
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
            raise UsageError(f"set_backward_passes_per_step({passes}): must be at least 1")
        if self._reducer.pending:
            raise UsageError(
                "set_backward_passes_per_step() was called between backward() and step(). Call it directly after "
                "step()."
            )
        self._reducer.passes = passes
        self._reducer.drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Raises UsageError between ``backward`` and ``step``, because it would lose gradients."""
        if self._reducer.pending:
            raise UsageError(
                "zero_grad() was called between backward() and step(), while gradients are reduced. Call it after "
                "step(), or after synchronize()."
            )
        self._plain.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._plain.add_param_group(param_group)
        self._reducer.adopt(_parameters(self._plain))


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
