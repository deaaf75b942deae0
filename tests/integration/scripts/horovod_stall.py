"""Elastic script whose rank 2 stays out of some calls until a file ``go-PLACE`` exists; see test_horovod_stalls.py."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import elasticstate
import elasticstate.horovod as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--where", choices=("first", "all", "set", "step"), nargs="+", required=True)
args = parser.parse_args()
PLACES = {"all": 3, "set": 3, "step": 4}  # the steps in which a rank is late
LATE = 1 if "set" in args.where else 2
pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[pair] if "set" in args.where else [])


def stay_out(where: str) -> None:
    """Wait for the file on the late rank of the first world."""
    if elasticstate.generation() == 1 and hvd.rank() == LATE:
        (args.log / f"late-{os.getpid()}").touch()
        while not (args.log / f"go-{where}").exists():
            time.sleep(0.01)


def call(step: int) -> None:
    """Make the call in which the others wait, and a step of the optimizer for ``step``."""
    for where in args.where:
        if step == PLACES.get(where):
            stay_out(where)
    if "set" in args.where and pair.included():
        hvd.allreduce(torch.ones(1), name=f"of pair {step}", process_set=pair)
    if "step" in args.where and step >= PLACES["step"]:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    hvd.allreduce(torch.ones(1), name=f"of all {step}")


model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < 6:
        call(state.step)
        state.step += 1
        state.commit()
    line = {"what": "final", "time": time.time(), "step": state.step, "rank": hvd.rank(), "size": hvd.size()}
    with open(args.log / f"{os.getpid()}.jsonl", "a") as log:
        log.write(json.dumps({**line, "generation": elasticstate.generation()}) + "\n")


if "first" in args.where:
    hvd.size()
    stay_out("first")
    hvd.barrier()
train(state)
