"""DistributedOptimizer: an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from elasticstate.horovod.compression import Compression, Compressor
from elasticstate.horovod.failures import OptimizerUsageError
from elasticstate.horovod.process_sets import ProcessSet, need_process_set
from elasticstate.horovod.reducer import Reducer
from elasticstate.horovod.reduction import Op, torch_operation

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
    reducer.adopt(_parameters(optimizer))
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
        self._reducer.adopt(_parameters(self._plain))


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
