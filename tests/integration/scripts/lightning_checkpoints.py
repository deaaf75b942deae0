"""A training with Lightning whose workers are killed once: in a validation, or when a checkpoint file was written."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import elasticstate as elastic
from elasticstate.lightning import LightningState, Trainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--files", type=Path, required=True)
parser.add_argument("--place", choices=["validation", "saved"], required=True)
parser.add_argument("--rank", type=int, help="rank that is killed; all by default")
args = parser.parse_args()


def die(place: str, trainer: pl.Trainer) -> None:
    if place == args.place and trainer.current_epoch == 1 and elastic.generation() == 1:
        trainer.strategy.barrier()
        if args.rank in (None, elastic.rank()):
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.strategy.barrier()


class Checkpoints(ModelCheckpoint):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        die("saved", trainer)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.float()[:, None]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer.weight.square().sum())  # smaller after each epoch
        if not self.trainer.sanity_checking:
            die("validation", self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@elastic.run
def train(state: LightningState) -> None:
    options: dict[str, Any] = {"dirpath": str(args.files), "filename": "{step}"}
    if args.place == "validation":
        options |= {"every_n_train_steps": 2, "save_top_k": -1}
    else:
        options |= {"monitor": "val_loss", "save_last": True}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(state, max_epochs=3, accelerator="cpu", callbacks=[Checkpoints(**options)], **quiet)
    loader = elastic.ElasticDataLoader(range(16), global_batch_size=4)
    trainer.fit(state.model, loader, DataLoader(range(4), batch_size=4))  # type: ignore[arg-type]


train(LightningState(Model()))
