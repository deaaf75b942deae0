"""A training with CUDA graphs of a fake device (fake_nccl.py), which have captured an operation of each group.

The graph of each world is garbage when the script has left it, in a cycle, as those of real programs often are.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import fake_nccl
import torch
import torch.distributed as dist

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--keep", action="store_true", help="keep the graphs of all worlds")
args = parser.parse_args()
kept = []
fake_nccl.install()
slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
state = elastic.TorchState(weight=torch.zeros(4), step=0)


def note(what: str, **fields: object) -> None:
    log.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **fields}) + "\n")


@elastic.run
def train(state: elastic.TorchState) -> int:
    g, rank = elastic.generation(), elastic.rank()
    graph = fake_nccl.Graph()
    graph.itself = graph
    if args.keep:
        kept.append(graph)
    note("enter", generation=g, rank=rank, size=elastic.size(), step=state.step, digest=str(state.weight.tolist()))
    while state.step < args.steps:
        total = torch.ones(4)
        dist.all_reduce(total)
        state.weight += total
        state.step += 1
        time.sleep(0.01)
        state.commit()
        note("commit", generation=g, rank=rank, step=state.step)
    return state.step


result = train(state)
note("final", generation=elastic.generation(), rank=elastic.rank(), step=result, digest=str(state.weight.tolist()))
