"""A script that writes a checkpoint at each step, and continues from it: ``resuming.py DIRECTORY``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elasticstate as elastic

directory = Path(sys.argv[1])
checkpoint = directory / "checkpoint.pt"


def note(line: str) -> None:
    with open(directory / "steps", "a") as steps:
        steps.write(line + "\n")


@elastic.run
def train(state: elastic.TorchState) -> None:
    if elastic.rank() == 0:
        note(f"start {state.step}")
    while True:
        stops = torch.tensor([float((directory / "stop").exists())])
        dist.all_reduce(stops)
        if stops:
            return
        state.step += 1
        state.commit()
        if elastic.rank() == 0:
            new = checkpoint.with_suffix(".new")
            torch.save(state.step, new)
            new.replace(checkpoint)
            note(str(state.step))
        time.sleep(0.1)


train(elastic.TorchState(step=torch.load(checkpoint) if checkpoint.exists() else 0))
