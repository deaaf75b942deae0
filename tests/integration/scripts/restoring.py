"""``restoring.py LOG RANKS``: all ranks call ``state.restore()`` in step 6. RANKS: their newest commits are damaged.

With RANKS "none-between", the restore follows a tick without a commit. With "alone", only rank 1 calls it.
"""

from __future__ import annotations

import fast_import  # noqa: F401  # isort: skip - first

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic
from elasticstate.state.base import committer_of

folder, damaged = Path(sys.argv[1]), sys.argv[2].split(",")
log = open(folder / f"{os.environ['ELASTICSTATE_WORKER'].replace(':', '-')}.jsonl", "a", buffering=1)  # noqa: SIM115

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


def note(what: str) -> None:
    weights = model.weight.double().sum().item()
    shared = {"generation": elastic.generation(), "rank": elastic.rank(), "step": state.step, "weights": weights}
    log.write(json.dumps({"what": what, "time": time.time(), **shared}) + "\n")


def flip_a_bit() -> None:
    buffer = committer_of(state).snapshot._newer
    buffer.memory[buffer.frame.tensors] ^= 1


@elastic.run
def train(state: Any) -> None:
    ddp = DistributedDataParallel(model, init_sync=False)
    note("enter")
    has_restored = False
    while state.step < 12:
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        state.step += 1
        if state.step == 7 and damaged == ["none-between"] and not has_restored:
            state.check_host_updates()
        else:
            state.commit()
        if state.step == (7 if damaged == ["none-between"] else 6) and elastic.generation() == 1 and not has_restored:
            if str(elastic.rank()) in damaged:
                flip_a_bit()
            if damaged == ["alone"] and elastic.rank() != 1:
                continue
            dist.barrier() if damaged != ["alone"] else None
            state.restore()
            has_restored = True
            note("restored")
    note("end")


train(state)
