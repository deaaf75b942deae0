"""A training that fails at any batch goes on where the last commit stands, and ends as an undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import elasticstate as elastic
from elasticstate.lightning import LightningState, Trainer
from elasticstate.lightning.loader import TrainingBatches

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
Fit = Callable[..., Trainer]
SAMPLES, BATCHES, EPOCHS = 11, 6, 2


class Failure(Exception):
    """Failure of a world."""


class FailAt(pl.Callback):
    """Raises at the beginning of the batch with this number, once; before that, after the batches of an earlier world."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise Failure


def train(fit: Fit, state: LightningState, next_world: Callable[[], None], fails: list[int], **options: Any) -> Any:
    """Train through failures. Return the trace without what was trained again, and what a training ends with."""
    elastic_loader = elastic.ElasticDataLoader(range(SAMPLES), 2, seed=5)
    steps: list[int] = []

    def world(*callbacks: pl.Callback) -> Trainer:
        torch.manual_seed(7)  # as a script may do
        watch = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: steps.append(logged(trainer)))
        return fit(state, elastic_loader, DataLoader(range(4)), callbacks=[*callbacks, watch], **options)

    for batch in fails:
        with pytest.raises(Failure):
            world(FailAt(batch))
        state.restore()
        next_world()
        state.sync()
    trainer = world()
    optimizer = trainer.optimizers[0]
    tensors = [*state.model.parameters(), *(t for entry in optimizer.state.values() for t in entry.values())]
    rates = [group["lr"] for group in optimizer.param_groups]
    return state.model.trace, steps, [t.tolist() for t in tensors], rates, trainer.global_step, trainer.current_epoch


def logged(trainer: pl.Trainer) -> int:
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": EPOCHS},
        {"max_epochs": EPOCHS, "val_check_interval": 0.5},
        {"max_epochs": EPOCHS, "accumulate_grad_batches": 2},
        {"max_epochs": -1, "max_steps": EPOCHS * BATCHES},
    ],
    ids=str,
)
def test_a_failure_at_each_batch_changes_nothing(
    next_world: Callable[[], None], model: Any, fit: Fit, options: dict[str, Any]
) -> None:
    first = {name: value.clone() for name, value in model.state_dict().items()}

    def run(fails: list[int]) -> Any:
        model.load_state_dict(first)
        model.trace.clear()
        next_world()
        state = LightningState(model)
        state.sync()
        trace, *rest = train(fit, state, next_world, fails, **options)
        return list(trace), *rest

    undisturbed = run([])
    step = options.get("accumulate_grad_batches", 1)
    assert undisturbed == run(list(range(0, EPOCHS * BATCHES, step)))
