"""Trains with Lightning on scikit-learn's digits, and logs samples and losses; see test_lightning.py.

The lines of ``<log>/<host>-<slot>-<incarnation>.jsonl`` are::

    {"what": "enter" or "final", "rank": r, "size": n, "pid": p, "step": s, "digest": "..."}
    {"what": "trained", "epoch": e, "step": s, "batch": b, "ids": [...], "loss": sum over the samples, "random": x}
    {"what": "validated", "epoch": e, "step": s}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticstate.lightning
from elasticstate.loggers import Log, TensorBoard

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--batch-size", type=int)
parser.add_argument("--global-batch-size", type=int)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--commit-every", type=int, default=1)
parser.add_argument("--epochs", type=int, default=1_000)
parser.add_argument(
    "--until", type=Path, help="the epoch at whose end this file exists is the last, from the second on"
)
parser.add_argument("--step-seconds", type=float, default=0.0)
args = parser.parse_args()

slot_id = os.environ.get("ELASTICSTATE_WORKER", "alone").replace(":", "-")
log_file = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    world = {"generation": elasticstate.generation(), "rank": elasticstate.rank(), "size": elasticstate.size()}
    log_file.write(json.dumps({"what": what, "time": time.time(), "pid": os.getpid(), **world, **fields}) + "\n")


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.register_buffer("total", torch.zeros(10), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels, ids = batch
        losses = nn.functional.cross_entropy(self.layers(images), labels, reduction="none")
        self.total += 1
        where = {
            "epoch": self.current_epoch,
            "step": self.global_step,
            "batch": batch_idx,
            "random": torch.rand(()).item(),
        }
        counts = loader.weight > 0
        note("trained", **where, ids=ids.tolist() if counts else [], loss=losses.sum().item() if counts else 0.0)
        self.log("loss", losses.mean())
        time.sleep(args.step_seconds)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(images), labels))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            note("validated", epoch=self.current_epoch, step=self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.95)
        by_loss = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.9)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_loss, "monitor": "val_loss"}]


class Watch(pl.Callback):
    """Logs the state with which each world begins and ends, and ends the training when the file exists."""

    def __init__(self) -> None:
        self.epochs = 0  # as a callback's state

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        note("enter", step=trainer.global_step, digest=digest(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.epochs += 1
        if args.until and self.epochs >= 2 and trainer.strategy.broadcast(args.until.exists()):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        epochs = {"epochs": self.epochs, "epoch": trainer.current_epoch}
        callbacks = {
            "waited": trainer.early_stopping_callback.wait_count,
            "best": trainer.checkpoint_callback.best_model_path,
        }
        note("final", step=trainer.global_step, digest=digest(trainer), lr=lr, **epochs, **callbacks)


def digest(trainer: pl.Trainer) -> str:
    found = hashlib.sha256()
    tensors = [*trainer.lightning_module.parameters(), *trainer.lightning_module.buffers()]
    for entry in trainer.optimizers[0].state.values():
        tensors += entry.values()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


pl.seed_everything(1, verbose=False)
torch.set_num_threads(1)
digits = load_digits()
dataset = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target), torch.arange(len(digits.target))
)
training = torch.utils.data.Subset(dataset, range(args.samples))
validation = torch.utils.data.Subset(dataset, range(1400, 1500))
model = Digits()
loader = elasticstate.ElasticDataLoader(training, args.batch_size, global_batch_size=args.global_batch_size, seed=11)


@elasticstate.run
def train(state: elasticstate.lightning.LightningState) -> None:
    trainer = elasticstate.lightning.Trainer(
        state,
        commit_every=args.commit_every,
        accelerator="cpu",
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        callbacks=[
            Watch(),
            EarlyStopping("val_loss", patience=1000),
            ModelCheckpoint(monitor="val_loss", filename="best"),
        ],
        logger=[CSVLogger(args.log.parent, name="csv"), elasticstate.lightning.LogLogger(state)],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, DataLoader(validation, batch_size=100))


log = Log(TensorBoard(args.log.parent / "tensorboard"))
train(elasticstate.lightning.LightningState(model, log=log))
