"""Ticks that consist of sleep and a step with DDP; see test_stragglers.py. The slot in the file ``slow`` is slower."""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--even", type=int, required=True, help="short ticks, of which none is slow")
parser.add_argument("--in-turn", type=int, required=True, help="ticks in each of which another rank is slow")
args = parser.parse_args()
SHORT_S, LONG_S, SLOWER = 0.02, 0.1, 1.3  # a delay of a millisecond, by other programs, makes no tick a slow one

with suppress(PermissionError):  # other tests on its core would make a rank slow
    os.setpriority(os.PRIO_PROCESS, 0, -10)

model = torch.nn.Linear(8, 8)
state = elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), step=0)


def note(what: str, **values: object) -> None:
    line = {"what": what, "time": time.time(), "slot": elastic.local_rank(), "step": state.step, **values}
    with (args.folder / "logs" / f"{elastic.local_rank()}.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")


def pause_s() -> float:
    """Return the duration of this rank's own work in this step."""
    if state.step < args.even:
        return SHORT_S
    if state.step < args.even + args.in_turn:
        return LONG_S / 2 * (2.0 if state.step % elastic.size() == elastic.rank() else 1.0)
    slow = args.folder / "slow"
    is_slow = slow.exists() and slow.read_text() == str(elastic.local_rank())
    note("step", is_slow=is_slow)
    return LONG_S * (SLOWER if is_slow else 1.0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp = DistributedDataParallel(state.model)
    while True:
        time.sleep(pause_s())
        state.optimizer.zero_grad()
        ddp(torch.ones(4, 8)).sum().backward()
        state.optimizer.step()
        state.step += 1
        ends = torch.tensor([float((args.folder / "stop").exists())])
        dist.all_reduce(ends)
        state.commit(every=10)
        if ends.item() > 0:
            return


train(state)
