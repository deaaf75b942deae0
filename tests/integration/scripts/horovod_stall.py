"""Elastic script whose rank 2 stays out of one call until the file ``go`` exists; see test_horovod_stalls.py."""

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
parser.add_argument("--where", choices=("all", "set", "step", "first", "gate"), required=True)
args = parser.parse_args()
LATE = 1 if args.where == "set" else 2
GO = args.log / "go"
pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[pair] if args.where == "set" else [])


def stay_out() -> None:
    """Wait for the file on the late rank of the first world."""
    if elasticstate.generation() == 1 and hvd.rank() == LATE:
        (args.log / f"late-{os.getpid()}").touch()
        while not GO.exists():
            time.sleep(0.01)


def call(step: int) -> None:
    """Make the call in which the others wait, and a step of the optimizer for ``step``."""
    if step == 3 and args.where != "first":
        stay_out()
    if args.where == "set" and pair.included():
        hvd.allreduce(torch.ones(1), name=f"of pair {step}", process_set=pair)
    if args.where == "step":
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


if args.where == "first":
    hvd.size()
    stay_out()
    hvd.barrier()
train(state)
