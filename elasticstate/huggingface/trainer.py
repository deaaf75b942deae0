"""Trainer: ``transformers.Trainer`` that continues in each new world, with a constant global batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState

import elasticstate as elastic
from elasticstate.compat.libraries import forget_preparation, knows_world
from elasticstate.errors import UsageError
from elasticstate.extension import world_size
from elasticstate.huggingface.state import (
    TrainingLoader,
    TrainingState,
    batches_of,
    check_accelerator,
    check_dataset,
    check_world,
    elastic_loader,
    is_shuffled,
    refuse,
)

_PROGRESS = (  # the fields of Trainer.state that the training changes
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class _MicroBatch(NamedTuple):
    """A batch that fits into the device."""

    batch: Any
    weight: float  # of its mean loss, by samples; 0: a sample of another rank
    items: Any = None  # its number of labels, a tensor; None if they cannot be counted


_Trainer: Any = object  # for mypy: the class after ElasticTrainer is transformers.Trainer


class ElasticTrainer(_Trainer):  # type: ignore[misc]
    """Mixin for ``transformers.Trainer`` and its subclasses: ``class Mine(ElasticTrainer, Seq2SeqTrainer)``.

    Build it, and its ``TrainingArguments``, inside the function decorated with ``run``: both belong to one world. The
    model may be built outside; then it stays in memory. ``train()`` continues at the last commit, also in the middle of
    an epoch. A tick ends after each optimizer step, and after what follows it: log, evaluation, checkpoint.

    The global batch is constant: ``per_device_train_batch_size`` times ``gradient_accumulation_steps`` times ``-np``,
    or the ``workers`` of ``run``. Each rank's share comes in batches of at most ``per_device_train_batch_size``.

    Args:
        state: the state that ``run`` passes to the function.
        args, kwargs: those of ``transformers.Trainer``.
        commit_every: commit at each so many optimizer steps. Other steps end a tick without a commit.

    Raises UsageError for a world of another size, and for arguments that are not supported.
    """

    args: Any
    optimizer: Any
    get_train_dataloader: Any
    training_step: Any
    loss_is_scaled_for_ga: bool | None
    _loader: elastic.ElasticDataLoader
    _batches: TrainingLoader | None = None
    _divisor: Any = 1
    _is_weighted = False  # the present batch's loss: its divisor was read

    def __init__(self, state: TrainingState, *args: Any, commit_every: int = 1, **kwargs: Any) -> None:
        if not isinstance(state, TrainingState):
            raise UsageError(
                f"The first argument of {type(self).__name__} is a {type(state).__name__}, and must be the state that "
                "run passes to the function: Trainer(state, model=model, args=args, ...)."
            )
        if commit_every < 1:
            raise UsageError(f"commit_every={commit_every}: must be at least 1")
        if not knows_world():
            raise UsageError(
                "TrainingArguments must be built in each world, because they contain rank and size. Build them inside "
                "the function decorated with run."
            )
        self.elastic, self._commit_every = state, commit_every
        super().__init__(*args, **kwargs)
        self._check()
        self.args = copy.copy(self.args)
        share = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        self._global_batch: int = share * state.workers
        self._accumulation: int = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1  # the loop counts optimizer steps: _train_on has the parts
        self.args.average_tokens_across_devices = False  # else compute_loss multiplies by the size of the world
        self._ticked = -1  # the global step at which the last tick ended
        self._is_finished = self._has_begun = False
        self.callback_handler.callbacks.insert(0, _Callback(self))  # before the user's
        self._plain_loader = self.get_train_dataloader  # perhaps the user's own
        self.get_train_dataloader = self._elastic_loader
        if self.model_init is None:  # else train() makes another model
            self.elastic.attach(model=self.model)
            self.elastic.load("model")  # an evaluation may come before train()

    def _check(self) -> None:
        """Raise UsageError for arguments with which a training cannot be elastic, or would go wrong."""
        args = self.args
        check_world("TrainingArguments", args.world_size)
        check_accelerator(self.accelerator)
        for name in ("deepspeed", "fsdp", "parallelism_config"):
            if getattr(args, name):
                refuse(f"{name}=", "Remove it: each rank must hold the whole model.")
        if self.is_distributed_loading_by_transformers:
            refuse("A model with a DistributedConfig", "Load it without: each rank must hold the whole model.")
        if args.train_sampling_strategy not in ("random", "sequential"):
            refuse(f"train_sampling_strategy={args.train_sampling_strategy!r}", "Use 'random' or 'sequential'.")
        if not args.average_tokens_across_devices:
            refuse("average_tokens_across_devices=False", "Remove it: the loss would depend on the number of workers.")
        for name, off in {"auto_find_batch_size": False, "include_num_input_tokens_seen": "no"}.items():
            if getattr(args, name) != off:
                refuse(f"{name}={getattr(args, name)!r}", "Remove it.")
        if args.neftune_noise_alpha is not None:
            refuse("neftune_noise_alpha", "Remove it: its hook would be added again in each world.")
        config = getattr(self.model, "config", None)
        if type(self.model).__name__.endswith("ForCTC") and getattr(config, "ctc_loss_reduction", None) == "sum":
            refuse(
                'ctc_loss_reduction="sum", the default of this model,',
                'Use from_pretrained(..., ctc_loss_reduction="mean"): a sum would depend on the number of workers.',
            )
        if "layerwise" in args.optim or "lomo" in args.optim:
            refuse(
                f"optim={str(args.optim)!r}",
                "Use an optimizer whose state_dict() has its state, such as 'adamw_torch'.",
            )

    def _elastic_loader(self) -> TrainingLoader:
        """Return a loader with the data set, the collator and the order of the Trainer's, or of the user's override."""
        if self._batches is not None:
            return self._batches
        if self.train_dataset is None:
            raise UsageError("Trainer: train_dataset is None. Pass a data set.")
        plain = self._plain_loader()
        if not isinstance(plain, DataLoader):
            refuse(f"get_train_dataloader(), which returns a {type(plain).__name__},", "Return a DataLoader.")
        check_dataset(plain.dataset)
        shuffle = is_shuffled(
            plain,
            f"Remove what gives {type(self).__name__} another order: its get_train_dataloader(), _get_train_sampler(), "
            "or an argument such as batch_sampler.",
        )
        batches = batches_of(plain)
        if batches.batch_size != self.args.train_batch_size:
            refuse(
                f"get_train_dataloader() with batches of {batches.batch_size}",
                f"Set per_device_train_batch_size={batches.batch_size}, which is {self.args.train_batch_size}.",
            )
        self._loader = elastic_loader(
            plain,
            self._global_batch,
            self.args.per_device_train_batch_size,
            shuffle=shuffle,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=batches.drop_last,
        )
        self.elastic.attach(loader=self._loader)
        self.elastic.load("loader")
        self._batches = TrainingLoader(self._loader, self._global_batch, lambda: iter(self._loader))
        return self._batches

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._global_batch

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """End the tick of the last step. Return the batches of the next one as one item, and their number of labels."""
        if not self._loader.steps_left:
            return [], None
        if self._ticked < self.state.global_step:
            self._end_tick()
        parts = [part._replace(items=self._items(part.batch)) for part in self._next_step(epoch_iterator)]
        if any(part.items is None for part in parts):
            return [parts], None
        total = torch.zeros((), device=device)
        for part in parts:
            if part.weight:
                total += part.items
        if world_size() > 1:
            dist.all_reduce(total)
        return [parts], total

    def _items(self, batch: Any) -> Any:
        """Return the number of labels over which the loss of the batch is a mean; None if it cannot be counted."""
        number = self._get_num_items_in_batch([batch], self.args.device)
        if number is None and isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor):
            number = batch["labels"].ne(-100).sum()  # the model does not request it
        return None if number is None else torch.as_tensor(number, device=self.args.device)

    def _next_step(self, batches: Iterator[Any]) -> Iterator[_MicroBatch]:
        for batch in batches:
            if self.accelerator.device_placement:  # as a prepared DataLoader: an override may not call _prepare_inputs
                batch = send_to_device(batch, self.accelerator.device, non_blocking=self.accelerator.non_blocking)
            yield _MicroBatch(batch, self._loader.weight)
            if self._loader.step_ends:
                return

    def _train_on(self, model: Any, inputs: list[_MicroBatch], num_items_in_batch: Any = None) -> Any:
        """Add the gradients of all batches of one optimizer step, by ``training_step``. Return the sum of their losses.

        Each batch has the share of its labels as weight. Its loss gets its own number of labels as
        ``num_items_in_batch``: then it is a mean over the batch, whether the model uses this number or computes a mean
        anyway. Signatures do not tell which (BERT accepts the number, and ignores it).
        """
        given, total = self.loss_is_scaled_for_ga, None
        for number, part in enumerate(inputs):
            share, items = self._share_and_items(part, num_items_in_batch, bool(given))
            self.current_gradient_accumulation_steps = 1 / share  # the Trainer divides the loss by it
            self.loss_is_scaled_for_ga = bool(given and part.weight)
            self._is_weighted = self.loss_is_scaled_for_ga
            with nullcontext() if number == len(inputs) - 1 else self.accelerator.no_sync(model):
                loss = self._step_of_batch(model, part.batch, *([items] if self._passes_items else []))
            if not self._is_weighted:
                raise UsageError(
                    f"training_step() of {type(self).__name__} does not divide the loss by "
                    "self.current_gradient_accumulation_steps, so the gradient would depend on the number of workers. "
                    "Write loss = loss / self.current_gradient_accumulation_steps before backward(). If the loss is a "
                    "sum divided by num_items_in_batch, set loss_is_scaled_for_ga = True in the class instead."
                )
            loss = torch.where(share > 0, loss, 0.0)  # a mean over no labels is not a number
            total = loss if total is None else total + loss
        self.loss_is_scaled_for_ga = given
        assert total is not None, "each step has a batch on each rank"
        return total

    @property
    def current_gradient_accumulation_steps(self) -> Any:
        """The divisor of the mean loss of the present batch. ``training_step`` must use it."""
        self._is_weighted = True
        return self._divisor

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, divisor: Any) -> None:
        self._divisor = divisor

    def _share_and_items(self, part: _MicroBatch, total: Any, is_scaled: bool) -> tuple[torch.Tensor, Any]:
        """Return the weight of the loss of a batch, and ``num_items_in_batch`` for it.

        ``total``: of the whole step. ``is_scaled``: the user's ``compute_loss`` divides by it.
        """
        if total is None:
            return torch.tensor(part.weight, device=self.args.device), None
        own = part.items if part.weight else torch.zeros_like(part.items)
        share = torch.where(own > 0, world_size() * own / total.clamp(min=1), 0.0)
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            return share, None
        if is_scaled:
            return share, total / world_size()
        return share, part.items.clamp(min=1)

    def floating_point_ops(self, inputs: list[_MicroBatch]) -> Any:
        return sum(super(ElasticTrainer, self).floating_point_ops(part.batch) for part in inputs if part.weight)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Train, or continue at the last commit. ``resume_from_checkpoint`` counts only before the first commit."""
        if self._has_begun:
            raise UsageError("train() was called a second time in this world. Call it once in the decorated function.")
        if trial is not None:
            refuse("A hyperparameter search", "Run each trial as a job.")
        self._has_begun = True
        self._step_of_batch = self.training_step  # perhaps the user's own, of the class or of this object
        self._passes_items = _takes(self._step_of_batch, 3)
        self.training_step = self._train_on  # for the Trainer's loop, whose item is a step
        forget_preparation(self.model)
        if self.elastic.begun:
            resume_from_checkpoint, self.args.eval_on_start = None, False
        return super().train(resume_from_checkpoint=resume_from_checkpoint, trial=trial, **kwargs)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None and self.elastic.last("model") is self.model:
            self.optimizer = self.elastic.last("optimizer")  # with its tensors; None in the first world
        return super().create_optimizer(model)

    def _init_training_state(
        self, max_steps: int, steps_in_epoch: int, epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Return the epoch in which the loop begins, and 0: the loader itself continues within the epoch."""
        epoch, steps = super()._init_training_state(max_steps, steps_in_epoch, epochs, checkpoint, trial)
        saved = self.elastic.trainer
        if saved is None:
            self._loader.load_state_dict(
                {**self._loader.state_dict(), "epoch": epoch, "consumed": steps * self._global_batch}
            )
            return epoch, 0
        for name, value in saved["progress"].items():
            setattr(self.state, name, copy.deepcopy(value))
        self.state.log_history = copy.deepcopy(self.elastic.log_history)
        for callback, attributes in zip(self._stateful_callbacks(), saved["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, copy.deepcopy(value))
        return (epochs if saved["finished"] else self._loader.epoch), 0

    def _begin(self) -> None:
        """Load the state into the objects of this world, once the Trainer has made them all."""
        optimizer, scaler = self.optimizer.optimizer, self.accelerator.scaler
        self.elastic.attach(model=self.model, optimizer=optimizer, scheduler=self.lr_scheduler, scaler=scaler)
        if saved := self.elastic.trainer:
            self._tr_loss += saved["loss"]
            self._total_loss_scalar, self._globalstep_last_logged = saved["logged_loss"], saved["logged_step"]
            self._initial_global_step = saved["first_step"]
        else:
            self._save_progress()
        self._ticked = self.state.global_step
        self.elastic.begin(self.args.per_device_train_batch_size, self._accumulation)

    def _end_tick(self) -> None:
        self._save_progress()
        self._ticked = self.state.global_step
        self.elastic.commit(every=self._commit_every)

    def _finish(self) -> None:
        self._is_finished = True
        self._save_progress()
        self.elastic.commit()

    def _save_progress(self) -> None:
        """Put the position of the loop into the state, equal on all ranks: losses become the mean over the ranks."""
        if world_size() > 1:
            dist.all_reduce(self._tr_loss)
            self._tr_loss /= world_size()
        self.store_flos()
        self.elastic.log_history = self.state.log_history
        self.elastic.trainer = {
            "progress": {name: getattr(self.state, name) for name in _PROGRESS},
            "callbacks": [callback.state()["attributes"] for callback in self._stateful_callbacks()],
            "loss": self._tr_loss.item(),
            "logged_loss": self._total_loss_scalar,
            "logged_step": self._globalstep_last_logged,
            "first_step": self._initial_global_step,
            "finished": self._is_finished,
        }

    def _stateful_callbacks(self) -> list[Any]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, ExportableState)]


def _takes(function: Callable[..., Any], number: int) -> bool:
    """Return True if a call with so many positional arguments fits. Older overrides of training_step have two."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    return True


class _Callback(transformers.TrainerCallback):
    """Calls of the Trainer's loop at the places that need more than an override of a public method."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        loader = self._trainer._loader
        steps = -(-loader.consumed // self._trainer._global_batch)
        state.epoch = loader.epoch + steps / len(train_dataloader)  # the Trainer counts only steps of this world

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.elastic.progress()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._finish()


class Trainer(ElasticTrainer, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with ``ElasticTrainer``: see there."""


class LogCallback(transformers.TrainerCallback):
    """Passes what the Trainer logs to a ``Log`` in the state, so that each step is written once::

        @run(log=Log(TensorBoard("runs")))
        def main(state):
            args = TrainingArguments(..., report_to="none")
            trainer = Trainer(state, ..., callbacks=[LogCallback(state)])

    The tags are those of Transformers: ``train/loss``, ``eval/loss``, … Values that differ by rank, such as times, are
    those of rank 0.

    Args:
        state: the state that ``run`` passes to the function.
        name: name of the log in the state.
    """

    def __init__(self, state: TrainingState, name: str = "log") -> None:
        self._log = getattr(state, name)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = {_tag(name): value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._log(state.global_step, numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log.close()


def _tag(name: str) -> str:
    for kind in ("eval", "test"):
        if name.startswith(f"{kind}_"):
            return f"{kind}/{name[len(kind) + 1 :]}"
    return f"train/{name}"
