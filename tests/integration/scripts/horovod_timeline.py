"""Elastic script that makes known calls with a timeline; see test_horovod_timeline.py. Rank 0 may kill itself."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

import elasticstate
import elasticstate.horovod as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--timeline", type=Path)
parser.add_argument("--in-train", action="store_true")
parser.add_argument("--kill", action="store_true")
args = parser.parse_args()
STEPS = 5
hvd.init()
if args.timeline and not args.in_train:
    hvd.start_timeline(str(args.timeline), mark_cycles=True)


def operations(step: int) -> None:
    """Make one call of each operation."""
    hvd.allreduce(torch.ones(4), name=f"sum {step}", op=hvd.Sum)
    handles = [hvd.allreduce_async(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.allgather(torch.ones(3, 2, dtype=torch.int32), name="rows")
    hvd.broadcast(torch.ones(5), 0, name="from 0")
    hvd.alltoall(torch.ones(6 * hvd.size()), name="shares")
    hvd.reducescatter(torch.ones(hvd.size()), name="parts")
    hvd.broadcast_object({"step": step}, name="object")
    hvd.allgather_object(step)
    hvd.barrier()


def wait_and_die() -> None:
    """Kill this process when the file ``go`` exists."""
    (args.log / "waits").touch()
    while not (args.log / "go").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


model = torch.nn.Linear(8, 8)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    if args.in_train:
        hvd.start_timeline(str(args.timeline))
    with open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1) as log:
        while state.step < STEPS:
            if args.kill and state.step == 3 and elasticstate.generation() == 1 and hvd.rank() == 0:
                wait_and_die()
            operations(state.step)
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            line = {"what": "step", "time": time.time(), "step": state.step, "rank": hvd.rank(), "size": hvd.size()}
            log.write(json.dumps({**line, "generation": elasticstate.generation()}) + "\n")
            state.step += 1
            state.commit()
    if args.in_train:
        hvd.stop_timeline()
        hvd.barrier()


train(state)
