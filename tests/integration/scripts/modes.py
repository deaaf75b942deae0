"""Trains two networks, and toggles modes for a while in each step; rank 1 may die while they are toggled.

``modes.py FOLDER WHAT WHO``: WHAT is "eval", "grad", "toggle" or "lightning"; WHO is "one" or "nobody". All ranks have
the same data, so the result does not depend on the size of the world.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

folder, (what, who) = Path(sys.argv[1]), sys.argv[2:4]
STEPS = 60


class Halved(torch.nn.Module):
    """Differs between train and eval mode, as dropout does, but without random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 if self.training else 1.0)


def die() -> None:
    """End rank 1 at step 20, once. The others find out in a collective."""
    if state_of().step == 20 and elastic.rank() == 1 and who == "one" and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.zeros(1))


torch.manual_seed(0)
first = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), Halved(), torch.nn.Linear(8, 4))
second = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
inputs = torch.randn(16, 4)


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return second(first(x)).square().mean()


def by_hand() -> None:
    pair = torch.nn.ModuleList([first, second])
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in pair]
    state = elastic.TorchState(pair=pair, one=optimizers[0], two=optimizers[1], step=0)
    global state_of
    state_of = lambda: state  # noqa: E731

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while state.step < STEPS:
            for net, other, optimizer in ((first, second, optimizers[0]), (second, first, optimizers[1])):
                if what == "toggle":
                    other.requires_grad_(False)
                model = DistributedDataParallel(net, init_sync=False)
                if what == "toggle" and net is second:
                    die()
                loss = second(model(inputs)) if net is first else model(first(inputs))
                loss.square().mean().backward()
                optimizer.step()
                pair.zero_grad()
                other.requires_grad_(True)
            state.step += 1
            state.commit()
            if state.step % 10 == 0 and what != "toggle":
                if what == "eval":
                    pair.eval()
                else:
                    torch.set_grad_enabled(False)
                die()
                loss_of(inputs)
                pair.train()
                torch.set_grad_enabled(True)

    train(state)


def with_lightning() -> None:
    import lightning.pytorch as pl

    from elasticstate.lightning import DDPStrategy, LightningState, Trainer

    class Pair(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second
            self.automatic_optimization = False
            self.register_buffer("done", torch.zeros((), dtype=torch.long))

        @property
        def step(self) -> int:
            return int(self.done)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (first, second)], []

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                die()
                optimizer.zero_grad()
                self.manual_backward(loss_of(inputs))
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            self.done += 1

    module = Pair()
    state = LightningState(module)
    global state_of
    state_of = lambda: module  # noqa: E731

    @elastic.run
    def train(state: LightningState) -> None:
        loader = elastic.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.arange(STEPS * 2.0)), global_batch_size=2, shuffle=False
        )
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        options: Any = {**quiet, "enable_model_summary": False, "max_epochs": 1, "accelerator": "cpu"}
        trainer = Trainer(state, strategy=DDPStrategy(state, find_unused_parameters=True), **options)
        trainer.fit(state.model, loader)

    train(state)


state_of: Any
with_lightning() if what == "lightning" else by_hand()
if elastic.rank() == 0:
    nets = torch.nn.ModuleList([first, second])
    print("trained:", [p.tolist() for p in nets.parameters()], flush=True)
