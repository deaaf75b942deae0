"""A warning about gradients that accumulate over a tick: no commit contains them, and a new world has none.

So after a failure, or a planned change at that tick, a step would lack the gradients of some batches, without any
notice. The gradient of one parameter is followed: it was begun before a tick if the step uses the tensor that the tick
met, and something has been added to it since.
"""

from __future__ import annotations

import weakref

import torch
from torch.optim import Optimizer

from elasticstate.log import logger

_Mark = tuple["weakref.ref[torch.Tensor]", int]
"""A gradient, and its version."""

_MOST_ZEROS = 20  # at ticks, before no more is looked at: a look waits for the device
_has_warned = False


class Accumulation:
    """Follows the gradients of one optimizer. Create it when the optimizer is about to step."""

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        least = min(parameters, key=torch.Tensor.numel, default=None)
        self._parameter = weakref.ref(least) if least is not None else None
        self._at_step = self._mark()
        self._at_tick: _Mark | None = None
        self._is_suspected = False
        self._zeros = 0  # ticks at which the gradient was zero

    def begin_step(self) -> None:
        """Note that the optimizer is about to use the gradients."""
        before, self._at_tick, self._at_step = self._at_tick, None, self._mark()
        if before is None or self._at_step is None or self._at_step[0]() is not before[0]():
            return
        if self._at_step[1] > before[1]:
            if self._is_suspected:
                _warn()
            self._is_suspected = True

    def end_tick(self) -> None:
        """Note a gradient that no step has used yet."""
        mark = self._mark()
        self._at_tick = None if mark is None or self._is(mark, self._at_step) else mark
        if self._at_tick is not None and self._is_suspected and self._is_zero():  # set to zero in place
            self._at_tick = None
            self._zeros += 1
            if self._zeros == _MOST_ZEROS:
                self._parameter = None

    def _mark(self) -> _Mark | None:
        parameter = self._parameter() if self._parameter is not None else None
        grad = parameter.grad if parameter is not None else None
        return (weakref.ref(grad), grad._version) if grad is not None else None

    def _is_zero(self) -> bool:
        grad = self._at_tick[0]() if self._at_tick is not None else None
        return grad is None or not bool(grad.any() if not grad.is_sparse else grad._values().any())

    @staticmethod
    def _is(mark: _Mark, other: _Mark | None) -> bool:
        return other is not None and mark[0]() is other[0]() and mark[1] == other[1]


def _warn() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning(
            "a step uses gradients from before the last commit() or check_host_updates(). No commit contains them, "
            "so after a failure or a change of the workers the step would be made without them. Call both only after "
            "a step."
        )
