"""The training that every system of the bench runs: the same model, batch, step and log."""

from __future__ import annotations

import gc
import importlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

WIDTH, HIDDEN, BATCH = 1024, 2304, 8


class Step(NamedTuple):
    """A completed step, as a line of a worker's log."""

    end_ns: int  # CLOCK_MONOTONIC, which all processes of a machine share
    step: int
    pid: int
    generation: int
    rank: int
    checkpoint_ns: int  # duration of the commit or checkpoint after the step


class StepLog:
    """Log of one process, open until its end. Gets one line per step, written when the step is complete."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"{os.getpid()}.steps", "a", buffering=1)  # noqa: SIM115

    def write(self, step: int, generation: int, rank: int, end_ns: int, checkpoint_ns: int = 0) -> None:
        self._file.write(" ".join(map(str, Step(end_ns, step, os.getpid(), generation, rank, checkpoint_ns))) + "\n")


def make_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of 10.03 M float32 parameters, and SGD with momentum: 80 MB of state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> int:
    """Make one step on a batch of its own. Return the time of its end."""
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step * 1000 + rank))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), batch).backward()
    optimizer.step()
    return time.monotonic_ns()


def warm_up() -> None:
    """Prepare as a long-running worker: import slow modules, and exclude all objects so far from the collector."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.nn.functional")
    gc.collect()
    gc.freeze()


def warm_up_steps(model: nn.Module) -> None:
    """Compute gradients, as a newcomer does before the others stop for it: their memory is then in use."""
    for step in range(2):
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        nn.functional.mse_loss(model(batch), batch).backward()
