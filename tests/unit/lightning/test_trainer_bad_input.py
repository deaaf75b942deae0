"""Options, loaders and calls that cannot work in an elastic job are refused, with a remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy as PlainDDP, FSDPStrategy
from torch.utils.data import DataLoader

import elasticstate as elastic
from elasticstate.errors import UsageError
from elasticstate.lightning import DDPStrategy, LightningState, Trainer
from elasticstate.lightning.strategy import ElasticEnvironment

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
Fit = Callable[..., Trainer]


def test_a_missing_lightning_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("elasticstate.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(UsageError, match=r"pip install 'elasticstate\[lightning\]'"):
        import_module("elasticstate.lightning")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fsdp"}, "strategy='fsdp' is not supported"),
        ({"strategy": "deepspeed"}, "strategy='deepspeed' is not supported"),
        ({"strategy": "ddp_spawn"}, "strategy='ddp_spawn' is not supported"),
        ({"strategy": FSDPStrategy()}, "strategy=FSDPStrategy is not supported"),
        ({"strategy": PlainDDP()}, "strategy=DDPStrategy is not supported"),
        ({"devices": 4}, "Remove devices="),
        ({"num_nodes": 2}, "Remove num_nodes="),
        ({"reload_dataloaders_every_n_epochs": 0}, "is always 1"),
        ({"plugins": [LightningEnvironment()]}, "plugins=LightningEnvironment"),
        ({"plugins": LightningEnvironment()}, "plugins=LightningEnvironment"),
        ({"callbacks": LearningRateFinder()}, "LearningRateFinder trains on its own"),
        ({"callbacks": [BatchSizeFinder()]}, "BatchSizeFinder trains on its own"),
        ({"commit_every": 0}, "commit_every=0: must be at least 1"),
    ],
)
def test_an_option_that_cannot_work(state: LightningState, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Trainer(state, **options)


def test_a_strategy_of_another_state(state: LightningState) -> None:
    with pytest.raises(UsageError, match="another state"):
        Trainer(state, strategy=DDPStrategy(LightningState(state.model)))


def test_other_states_and_modules(next_world: Callable[[], None], model: pl.LightningModule) -> None:
    with pytest.raises(UsageError, match=r"LightningState\(Linear\): must be a LightningModule"):
        LightningState(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Trainer\(TorchState\): the first argument must be the LightningState"):
        Trainer(elastic.TorchState(model=model))  # type: ignore[arg-type]


def test_a_trainer_outside_a_world(model: pl.LightningModule) -> None:
    with pytest.raises(UsageError, match="no world yet"):
        Trainer(LightningState(model))


def test_a_trainer_of_another_world(state: LightningState, next_world: Callable[[], None]) -> None:
    trainer = Trainer(state)
    next_world()
    with pytest.raises(UsageError, match="built in world 1, and this is world 2"):
        trainer.fit(state.model)


def test_a_world_of_another_size(next_world: Callable[[], None]) -> None:
    with pytest.raises(UsageError, match="built for 4 workers, but this world has 1"):
        ElasticEnvironment().validate_settings(num_devices=2, num_nodes=2)


@pytest.mark.parametrize("name", ["main_address", "main_port"])
def test_lightning_never_makes_a_process_group(next_world: Callable[[], None], name: str) -> None:
    with pytest.raises(UsageError, match="elasticstate creates one for each world"):
        getattr(ElasticEnvironment(), name)


def test_a_second_fit_and_another_module(state: LightningState, fit: Fit) -> None:
    with pytest.raises(UsageError, match="not the module of the state"):
        Trainer(state).fit(type(state.model)())
    fit(state)
    with pytest.raises(UsageError, match="called twice"):
        fit(state)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(range(8)), "The training loader is a DataLoader"),  # type: ignore[arg-type]
        ({"a": DataLoader(range(8))}, "The training loader is a DataLoader"),  # type: ignore[arg-type]
        (elastic.ElasticDataLoader(range(8), global_batch_size=4, micro_batch_size=1), "accumulate_grad_batches"),
        ([elastic.ElasticDataLoader(range(8), 2), elastic.ElasticDataLoader(range(8), 2)], "one ElasticDataLoader"),
    ],
    ids=["plain", "dict", "micro_batches", "two"],
)
def test_a_training_loader_that_would_repeat_samples(
    state: LightningState, fit: Fit, loader: object, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fit(state, loader)


def test_an_elastic_loader_for_the_validation(state: LightningState, fit: Fit) -> None:
    with pytest.raises(UsageError, match="with a plain DataLoader"):
        fit(state, val_loader=elastic.ElasticDataLoader(range(8), 2))


class Sharded(torch.optim.SGD):
    def consolidate_state_dict(self) -> None:
        raise AssertionError("a collective of all ranks")


def test_an_optimizer_whose_state_is_divided(state: LightningState, fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.model, "configure_optimizers", lambda: Sharded(state.model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="Sharded divides its state"):
        fit(state)
