"""A small training with Lightning in worlds of one, in the process of the test."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import elasticstate as elastic
from elasticstate import present_world
from elasticstate.compat.process_groups import HashStore
from elasticstate.worker.fixed import create_default_group

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
from elasticstate.lightning import LightningState, Trainer  # noqa: E402

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(pl.LightningModule):
    """Keeps a trace of what it was called for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trace: list[tuple[Any, ...]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trace.append(("batch", self.current_epoch, batch_idx, tuple(batch.tolist()), torch.rand(()).item()))
        loss = self.layer(batch.float()[:, None]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.trace.append(("validation", self.current_epoch, self.global_step))
        self.log("val_loss", self.layer(batch.float()[:, None]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        by_loss = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1)
        after_validation = {"scheduler": by_loss, "monitor": "val_loss", "strict": False}
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, after_validation]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence Lightning, and restore afterwards what its Trainer changes in the process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores the variable
        monkeypatch.delenv(name)
    monkeypatch.setattr(present_world, "_present", None)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))  # else Lightning sets it
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)


@pytest.fixture
def next_world() -> Iterator[Callable[[], None]]:
    """Enter a world of one. Return a function that enters the next one."""
    create_default_group(HashStore(), 0, 1)
    present_world.enter(present_world.alone())

    def enter() -> None:
        view = present_world.world()
        present_world.enter(msgspec.structs.replace(view, generation=view.generation + 1))

    yield enter
    dist.destroy_process_group()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(3)
    return Model()


@pytest.fixture
def state(next_world: Callable[[], None], model: Model) -> LightningState:
    state = LightningState(model)
    state.sync()
    return state


@pytest.fixture
def fit(model: Model) -> Callable[..., Trainer]:
    """Return a function that trains the model in the present world, and returns the Trainer."""

    def call(state: LightningState, loader: object = None, val_loader: object = None, **options: Any) -> Trainer:
        trainer = Trainer(state, **{"max_epochs": 1, **QUIET, **options})
        if loader is None:
            loader = elastic.ElasticDataLoader(range(8), 2, shuffle=False)
        if val_loader is None:
            val_loader = DataLoader(range(4), batch_size=4)  # type: ignore[arg-type]
        trainer.fit(model, loader, val_loader)
        return trainer

    return call
