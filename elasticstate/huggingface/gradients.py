"""StepGradients: the gradients of a step that has several batches. The script gets them when the last one is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]

from elasticstate.errors import UsageError


class StepGradients:
    """Gradients of the optimizer step in progress.

    A smaller world makes one step of several batches, of which the script does not know. So ``grad`` of all parameters
    is None after the backward pass of each batch but the last. Whatever the script does to gradients in these batches
    (``zero_grad()``, clipping, ``p.grad = None``) then has no effect, and in the last batch it acts on their sum.

    Args:
        parameters: returns all parameters that the script may train.
        weight: returns the factor of the present batch.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.nn.Parameter]], weight: Callable[[], float]) -> None:
        self._parameters, self._weight = parameters, weight
        self._held: dict[torch.nn.Parameter, torch.Tensor] = {}  # of the earlier batches of the step
        self._shared: list[torch.nn.Parameter] = []  # those whose grad contains what was held
        self._is_in_batch = False
        self._is_first = self._is_last = True  # batch of its step
        self._backwards = 0  # in the present batch
        self._has_acted = False  # the script has called step() or zero_grad() after a backward pass of this batch
        self._has_backward = False  # since the last step() or zero_grad()
        self._has_earlier = False  # grad contains an earlier step's gradients, with which step() was not called

    @property
    def is_complete(self) -> bool:
        """True if no batch of the step follows the present one, and outside the loop."""
        return self._is_last or not self._is_in_batch

    # ------------------------------------------------------------------------------------------------------------- loop

    def begin_loop(self) -> None:
        """Drop what a loop has left that ended inside a step. The loader returns all batches of that step again."""
        self._held = {}
        self._is_first = self._is_last = True

    def begin_batch(self, is_last: bool) -> None:
        """Begin the next batch. Raises UsageError if the last one has left gradients that would be lost."""
        if not self._is_in_batch or self._is_last:
            self._check_used()
            self._is_first = True
            self._has_earlier = self._has_backward = self._has_backward and self._has_gradients()
        else:
            self._check_origin()
            self._is_first = False
        self._is_in_batch, self._is_last = True, is_last
        self._backwards, self._has_acted, self._shared = 0, False, []

    def end_loop(self) -> None:
        """Leave the last batch. Raises UsageError as ``begin_batch``."""
        self._check_used()
        self._is_in_batch = False

    def leave_loop(self) -> None:
        """Leave the loop, perhaps inside a step. Do nothing after ``end_loop``."""
        self._is_in_batch = False

    def _check_used(self) -> None:
        if self._held:
            raise UsageError(
                "The last batch of an optimizer step had no accelerator.backward(), so the gradients of its other "
                "batches would be lost. Call backward() in each pass of the loop over the loader. In a smaller world, "
                "one step has several batches."
            )

    # --------------------------------------------------------------------------------------------------------- backward

    def before_backward(self) -> None:
        """Add what is held. Raises UsageError if the script has changed the gradients of only a part of the step."""
        if not self._is_in_batch or (self._is_first and self._is_last):
            return
        if self._backwards and (self._has_acted or any(p.grad is None for p in self._shared)):
            raise UsageError(
                "Two backward passes for one batch, and step() or zero_grad() between them: this step has several "
                "batches, as the world has become smaller, and the passes would use different samples. Call backward() "
                "once for each batch, or give the sum of the losses to one call."
            )
        is_visible = self._is_last if self._backwards else self._is_first
        if not is_visible:
            self._check_origin()
            for parameter, gradient in self._held.items():
                parameter.grad = gradient
        self._shared, self._held = [*self._shared, *self._held], {}

    def after_backward(self) -> None:
        """Hold the gradients if further batches of the step follow."""
        self._backwards += 1
        self._has_backward = True
        if self.is_complete:
            return
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._held[parameter] = parameter.grad
                parameter.grad = None
        self._shared = []

    # ------------------------------------------------------------------------------------------------ optimizer's calls

    def before_step(self, closure: Any) -> None:
        """Raises UsageError if a step would not use exactly the samples of one step."""
        is_whole = self._is_first and self._is_last
        if self._is_in_batch and not is_whole and closure is not None:
            raise UsageError(
                "optimizer.step(closure) needs all samples of a step at once, and this step has several batches, as "
                "the world has become smaller. Use an optimizer without a closure, or --min-np equal to -np."
            )
        self._has_acted = self._backwards > 0
        if not self.is_complete:
            self._check_held()
            return
        if self._is_in_batch and closure is None:
            if self._has_earlier:
                raise UsageError(
                    "optimizer.step() would use the gradients of several batches of the loader, and a smaller world "
                    "has more batches for the same samples. Give Accelerator gradient_accumulation_steps=, and call "
                    "step() and zero_grad() for each batch."
                )
            if not self._has_backward and (not is_whole or self._weight() != 1):
                self._check_origin()
        self._has_backward = self._has_earlier = False

    def before_zero(self) -> None:
        """Raises UsageError if gradients that are not held would be lost."""
        self._check_held()
        self._has_acted = self._backwards > 0
        if not self._held:
            self._has_backward = self._has_earlier = False

    def _has_gradients(self) -> bool:
        return any(p.grad is not None and bool(p.grad.count_nonzero()) for p in self._parameters())

    def _check_held(self) -> None:
        if self._held:
            self._check_origin()

    def _check_origin(self) -> None:
        if self._has_gradients():
            raise UsageError(
                "There are gradients that accelerator.backward() has not computed, and they would not have the weight "
                "of their samples. Call accelerator.backward(loss) in place of loss.backward()."
            )


class Optimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """AcceleratedOptimizer whose ``zero_grad()`` acts also between the batches of a step. There is nothing to lose."""

    gradients: StepGradients

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self.gradients.before_zero()
        self.optimizer.zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))

    def step(self, closure: Any = None) -> None:
        self.gradients.before_step(closure)
        super().step(closure)
