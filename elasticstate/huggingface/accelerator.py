"""Accelerator: ``accelerate.Accelerator`` for a loop that continues in each new world."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.scheduler import AcceleratedScheduler  # type: ignore[import-untyped]
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elasticstate.compat.libraries import forget_preparation
from elasticstate.compat.modules import has_scheduler
from elasticstate.errors import UsageError
from elasticstate.huggingface.state import (
    TrainingLoader,
    TrainingState,
    batches_of,
    check_accelerator,
    check_dataset,
    elastic_loader,
    is_shuffled,
    refuse,
)


class StepGradients:
    """Gradients of the optimizer step in progress.

    A smaller world makes one step of several batches, of which the script does not know. So ``grad`` of all parameters
    is None after the backward pass of each batch but the last. Whatever the script does to gradients in these batches
    (``zero_grad()``, clipping, ``p.grad = None``) then has no effect, and in the last batch it acts on their sum.

    ``parameters`` returns all parameters that the script may train, and ``weight`` the factor of the present batch.
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


_PLUGINS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "torch_tp_plugin",
)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerator of one world, whose model, optimizer, scheduler and training data continue in the next one::

        @run
        def main(state):
            accelerator = Accelerator(state, gradient_accumulation_steps=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for epoch in accelerator.epochs(3):
                for inputs, targets in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(criterion(model(inputs), targets))
                        optimizer.step()
                        optimizer.zero_grad()
                        state.commit()

    The first DataLoader that is prepared is the training's; later ones stay Accelerate's, for evaluation.

    The global batch is constant: the DataLoader's batch size times the accumulation steps times ``-np``, or the
    ``workers`` of ``run``. Each rank's share comes in batches of at most the DataLoader's size. After the last batch of
    a share, the ranks exchange gradients, and the optimizer makes a step. ``backward`` needs the mean loss of its
    batch, and weights it by the number of samples.

    Args:
        state: the state that ``run`` passes to the function.
        args, kwargs: those of ``accelerate.Accelerator``.

    Raises UsageError for a world of another size, and for modes that are not supported (DeepSpeed, FSDP, ...).
    """

    def __init__(self, state: TrainingState, *args: Any, **kwargs: Any) -> None:
        if not isinstance(state, TrainingState):
            raise UsageError(
                f"The first argument of Accelerator is a {type(state).__name__}, and must be the state that run passes "
                "to the function: Accelerator(state, cpu=True)."
            )
        for name in _PLUGINS:
            if kwargs.get(name) is not None:
                refuse(f"{name}=", "Remove it: each rank must hold the whole model.")
        super().__init__(*args, **kwargs)
        check_accelerator(self)
        self.elastic = state
        self._begun = False
        self._gradients = StepGradients(self._trained_parameters, lambda: float(state.loader.weight))

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        forget_preparation(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if not evaluation_mode:
            self.elastic.attach(model=model)
            self.elastic.load("model")
            self._model = prepared
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self.elastic.attach(optimizer=prepared.optimizer, scaler=self.scaler)
        prepared.__class__, prepared.gradients = Optimizer, self._gradients
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        self.elastic.attach(scheduler=scheduler)
        return _Scheduler(super().prepare_scheduler(scheduler), self)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        if self.elastic.attached("loader") is not None:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        check_dataset(data_loader.dataset)
        shuffle, batches = is_shuffled(data_loader), batches_of(data_loader)
        self._batch_size = batches.batch_size
        unit = self._batch_size * self.elastic.workers
        loader = elastic_loader(
            data_loader,
            unit * self.gradient_accumulation_steps,
            self._batch_size,
            shuffle=shuffle,
            seed=self.dataloader_config.data_seed or 0,
            drop_last=batches.drop_last,
        )
        self.elastic.attach(loader=loader)
        return TrainingLoader(loader, unit, self._batches)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Raise UsageError: these objects would not continue in the next world."""
        refuse("register_for_checkpointing()", "Pass the objects to run: @run(ema=ema). Then use state.ema.")

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs from the present one to ``number - 1``. Prepare all objects before."""
        self._begin()
        yield from self.elastic.loader.epochs(number)

    def _begin(self) -> None:
        if self._begun:
            return
        if missing := [name for name in ("model", "optimizer", "loader") if self.elastic.attached(name) is None]:
            raise UsageError(f"The training begins without {missing[0]}. Pass it to accelerator.prepare() first.")
        self._check_scheduler()
        self._begun = True
        self.elastic.begin(self._batch_size, self.gradient_accumulation_steps)

    def _check_scheduler(self) -> None:
        """Raise UsageError if a scheduler of the optimizer is in no value of the state."""
        is_known = self.elastic.attached("scheduler") is not None or any(
            isinstance(value, LRScheduler) for value in vars(self.elastic).values()
        )
        if not is_known and has_scheduler(self.elastic.attached("optimizer")):
            raise UsageError(
                "A learning rate scheduler of the optimizer was not passed to accelerator.prepare(). It would begin "
                "again in each world, and count the batches of a smaller world, which has more of them. Pass it to "
                "prepare()."
            )

    def _batches(self) -> Iterator[Any]:
        self._begin()
        loader = self.elastic.loader
        self._gradients.begin_loop()
        try:
            for batch in loader:
                self._gradients.begin_batch(loader.step_ends)
                self.sync_gradients = loader.step_ends
                with nullcontext() if loader.step_ends else self.no_sync(self._model):
                    yield send_to_device(batch, self.device) if self.device_placement else batch
            self._gradients.end_loop()
        finally:
            self._gradients.leave_loop()
            self.sync_gradients = True

    def _trained_parameters(self) -> Iterator[torch.nn.Parameter]:
        groups = self.elastic.attached("optimizer").param_groups
        both = *self._model.parameters(), *(parameter for group in groups for parameter in group["params"])
        yield from dict.fromkeys(both)

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Do nothing: the loader accumulates the gradients of all batches of one step."""
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradients of the mean loss of the present batch, by its share of the samples of all ranks.

        Until the last batch of a step, ``grad`` of all parameters is None afterwards: see StepGradients.
        """
        self._begin()
        self._gradients.before_backward()
        super().backward(loss * (self.elastic.loader.weight * self.gradient_accumulation_steps), **kwargs)
        self._gradients.after_backward()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale as ``accelerate.Accelerator``, once the gradients of the whole step are there."""
        if self._gradients.is_complete:
            super().unscale_gradients(optimizer)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip as ``accelerate.Accelerator``, once the gradients of the whole step are there."""
        if self._gradients.is_complete:
            super().clip_grad_value_(parameters, clip_value)


class _Scheduler:
    """Scheduler that makes as many steps for each optimizer step as Accelerate's does in the first world."""

    def __init__(self, prepared: AcceleratedScheduler, accelerator: Accelerator) -> None:
        self._prepared, self._accelerator = prepared, accelerator
        self._steps = accelerator.elastic.workers if prepared.step_with_optimizer else 1
        prepared.split_batches = True  # one step for each call

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._accelerator._gradients.is_complete:
            self._check_batches()
            return
        for _ in range(self._steps):
            inner = self._prepared.scheduler
            if inner.last_epoch < getattr(inner, "total_steps", sys.maxsize):  # OneCycleLR refuses further steps
                self._prepared.step(*args, **kwargs)

    def _check_batches(self) -> None:
        number = self._accelerator.gradient_accumulation_steps
        if number > 1 and not self._prepared.step_with_optimizer:
            raise UsageError(
                "step_scheduler_with_optimizer=False, and scheduler.step() in a batch that does not end its optimizer "
                f"step (gradient_accumulation_steps={number}): a larger world has fewer of these batches. Call step() "
                "if accelerator.sync_gradients, or after the loop."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)
