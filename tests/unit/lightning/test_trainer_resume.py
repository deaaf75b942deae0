"""A training that fails at any batch goes on where the last commit stands, and ends as an undisturbed one."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import elasticstate as elastic
from elasticstate.lightning import LightningState, Trainer
from elasticstate.lightning.state import TrainingBatches
from tests.unit.lightning.conftest import QUIET

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
Fit = Callable[..., Trainer]
SAMPLES, BATCHES, EPOCHS = 11, 6, 3


class Failure(Exception):
    """Failure of a world."""


class FailAt(pl.Callback):
    """Raises at the beginning of the batch with this number. Keeps the steps that loggers get."""

    def __init__(self, batch: int | None, steps: list[int]) -> None:
        self.batch = batch
        self.steps = steps

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise Failure

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.steps.append(trainer.fit_loop.epoch_loop._batches_that_stepped)


class Traced(LightningState):
    """A state that notes how much of the traces its last commit covers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._steps: list[int] = []
        self._covered = (0, 0)

    def commit(self, every: int = 1) -> None:
        newest, covered = self.commits[0], (len(self.model.trace), len(self._steps))
        super().commit(every)
        if self.commits[0] != newest:
            self._covered = covered

    def restore(self) -> None:
        super().restore()
        for trace, length in zip((self.model.trace, self._steps), self._covered, strict=True):
            del trace[length:]


def train(fit: Fit, state: Traced, next_world: Callable[[], None], fails: list[int], **options: Any) -> Any:
    """Train through failures. Return what was trained, without what was trained again, and the state at the end."""
    loader = elastic.ElasticDataLoader(range(SAMPLES), 2, seed=5)

    def world(fails_at: int | None) -> Trainer:
        torch.manual_seed(7)  # as a script may do
        return fit(state, loader, DataLoader(range(4)), callbacks=FailAt(fails_at, state._steps), **options)  # type: ignore[arg-type]

    for batch in fails:
        with pytest.raises(Failure):
            world(batch)
        state.restore()
        next_world()
        state.sync()
    trainer = world(None)
    optimizer = trainer.optimizers[0]
    tensors = [*state.model.parameters(), *(t for entry in optimizer.state.values() for t in entry.values())]
    rates = [group["lr"] for group in optimizer.param_groups]
    progress = trainer.global_step, trainer.current_epoch
    return list(state.model.trace), state._steps, [t.tolist() for t in tensors], rates, progress


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": EPOCHS},
        {"max_epochs": EPOCHS, "val_check_interval": 0.5},
        {"max_epochs": EPOCHS, "accumulate_grad_batches": 2},
        {"max_epochs": EPOCHS, "commit_every": 4},
        {"max_epochs": EPOCHS, "check_val_every_n_epoch": 2},
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
        state = Traced(model)
        state.sync()
        return train(fit, state, next_world, fails, **options)

    undisturbed = run([])
    assert undisturbed == run(list(range(EPOCHS * BATCHES)))


def test_the_data_module_makes_a_loader_for_each_epoch(state: LightningState, next_world: Callable[[], None]) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return elastic.ElasticDataLoader(range(SAMPLES), 2, seed=5)

        def val_dataloader(self) -> Any:
            return DataLoader(range(4))  # type: ignore[arg-type]

    def fit(*callbacks: pl.Callback) -> None:
        trainer = Trainer(state, max_epochs=2, callbacks=list(callbacks), **QUIET)
        trainer.fit(state.model, datamodule=Data())

    for batch in (4, 8):
        with pytest.raises(Failure):
            fit(FailAt(batch, []))
        state.restore()
        next_world()
        state.sync()
    fit()
    batches = [line for line in state.model.trace if line[0] == "batch"]
    used = Counter((line[1], sample) for line in batches for sample in line[3])
    assert used == Counter((epoch, sample) for epoch in range(2) for sample in range(SAMPLES))


def test_the_checkpoint_contains_no_tensor_of_the_module(state: LightningState, fit: Fit) -> None:
    average = torch.zeros(1)

    class Averages(pl.Callback):
        def on_save_checkpoint(
            self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
        ) -> None:
            checkpoint["state_dict"]["layer.bias"] = average

    fit(state, callbacks=[Averages()])
    assert state.checkpoint["state_dict"] == {"layer.bias": average}


def test_a_trainer_that_has_resumed_loads_a_file(
    state: LightningState, fit: Fit, next_world: Callable[[], None], tmp_path: Path
) -> None:
    with pytest.raises(Failure):
        fit(state, callbacks=FailAt(2, []))
    next_world()
    trainer = fit(state)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    before = state.model.layer.weight.item()
    torch.nn.init.zeros_(state.model.layer.weight)
    trainer.validate(state.model, DataLoader(range(4)), ckpt_path=tmp_path / "file.ckpt", verbose=False)  # type: ignore[arg-type]
    assert state.model.layer.weight.item() == before != 0


def test_signals_stay_those_of_the_worker(state: LightningState, fit: Fit) -> None:
    before, during = signal.getsignal(signal.SIGTERM), []
    look = pl.callbacks.LambdaCallback(on_train_batch_start=lambda *_: during.append(signal.getsignal(signal.SIGTERM)))
    fit(state, callbacks=look)
    assert set(during) == {before}


def test_the_length_of_an_epoch_counts_from_its_beginning() -> None:
    ticks: list[int] = []
    loader = elastic.ElasticDataLoader(range(10), 2, shuffle=False)
    batches = TrainingBatches(loader, lambda: ticks.append(loader.consumed))
    iterator = iter(batches)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    assert ticks == [0, 2], "a tick ends before the next batch is fetched"
    assert len(batches) == 5
    saved = batches.state_dict()
    list(iterator)
    assert len(batches) == 5
    batches.load_state_dict(saved)
    assert [batch.tolist() for batch in batches] == [[4, 5], [6, 7], [8, 9]]
    batches.set_epoch(0)
    assert loader.consumed == 10, "the present epoch stays where it is"
    batches.set_epoch(1)
    assert (loader.epoch, loader.consumed, len(batches)) == (1, 0, 5)
    next(iter(batches))
    batches.begin(1)
    assert (loader.epoch, loader.consumed, len(batches)) == (1, 0, 5)
