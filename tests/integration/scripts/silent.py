"""Training that hangs, or that commits nothing: ``silent.py KIND FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elasticstate as elastic

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 40
GO_ON = FOLDER / "go on"

state = elastic.TorchState(model=torch.nn.Linear(2, 2), step=0)


def die_once() -> None:
    died = FOLDER / f"rank {elastic.rank()} died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def hang(barrier_on_rank_0: bool) -> None:
    """Let rank 0 wait in a barrier that rank 1 does not enter; or rank 1 in a loop, until the test lets it go on."""
    if barrier_on_rank_0:
        if elastic.rank() == 0:
            dist.barrier()
    elif elastic.rank() == 1:
        while not GO_ON.exists():
            time.sleep(0.1)


@elastic.run
def train(state: elastic.TorchState) -> None:
    print("starts at step", state.step, flush=True)
    while state.step < STEPS:
        time.sleep(0.05)
        dist.all_reduce(torch.ones(3))
        state.step += 1
        if KIND in ("barrier", "loop") and state.step == 6:
            hang(KIND == "barrier")
        if state.step == 30 and (KIND == "ticks" or (KIND == "nothing" and elastic.rank() == 1)):
            die_once()  # with ticks, a survivor would have a record of the last one
        if KIND in ("barrier", "loop"):
            state.commit(every=3)
        elif KIND == "ticks":
            state.check_host_updates()


train(state)
