"""A job that ticks, commits and prints much. Each rank logs the times of its ticks, on a disk that is not full."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elasticstate as elastic

DIRECTORY = Path(sys.argv[1])
PRINTED = "x" * 1023 + "\n"
PRINTED_PER_TICK = 40
PAUSE_S = 0.02


@elastic.run
def train(state: elastic.State) -> None:
    with open(DIRECTORY / f"ticks-{elastic.rank()}", "a") as ticks:
        while True:
            is_over = torch.tensor([int((DIRECTORY / "stop").exists())])
            dist.broadcast(is_over, 0)
            if is_over:
                return
            print(PRINTED * PRINTED_PER_TICK, end="", flush=True)
            time.sleep(PAUSE_S)
            state.step += 1
            state.weights += 1
            state.commit()
            ticks.write(f"{time.monotonic()}\n")
            ticks.flush()


train(elastic.TorchState(step=0, weights=torch.zeros(1000)))
