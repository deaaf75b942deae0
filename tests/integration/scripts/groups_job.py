"""A training on fake_nccl.py with groups of its own in each world: of ``new_group``, ``split_group`` and a mesh.

In each step, the two ranks of each pair send and receive in their group. ``--die SLOT STEP``: the process of this slot
dies there, when its partner waits for it in a receive.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import fake_nccl
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--die", type=int, nargs=2, default=(-1, -1))
args = parser.parse_args()
fake_nccl.install()
slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
_, slot, incarnation = os.environ["ELASTICSTATE_WORKER"].split(":")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
kept: list[dist.ProcessGroup] = []
state = elastic.TorchState(weight=torch.zeros(4), step=0)


def note(what: str, **fields: object) -> None:
    log.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **fields}) + "\n")


def exchange(group: dist.ProcessGroup, ranks: list[int], value: torch.Tensor) -> torch.Tensor:
    """Send to the other rank of the pair and receive from it, in both of torch's ways."""
    if len(ranks) == 1:
        return value
    other = next(rank for rank in ranks if rank != dist.get_rank())
    place, again = torch.empty_like(value), torch.empty_like(value)
    if other == ranks[1]:
        dist.send(value, other, group)
        dist.recv(place, other, group)
    else:
        dist.recv(place, other, group)
        dist.send(value, other, group)
    works = [dist.P2POp(dist.isend, value, other, group), dist.P2POp(dist.irecv, again, other, group)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    assert torch.equal(place, again)
    return place


@elastic.run
def train(state: elastic.TorchState) -> int:
    g, rank, size = elastic.generation(), elastic.rank(), elastic.size()
    pairs = [[first, first + 1][: size - first] for first in range(0, size, 2)]
    groups = [dist.new_group(ranks) for ranks in pairs]
    pair, group = pairs[rank // 2], groups[rank // 2]
    half = dist.split_group(split_ranks=pairs)
    unlisted = dist.group.WORLD.split_group(pair, timedelta(seconds=60), None, f"unlisted {pair}")  # by torch
    kept.append(unlisted)
    mesh = init_device_mesh("cuda", (size // 2, 2), mesh_dim_names=("rows", "columns")) if size % 2 == 0 else None
    note("enter", generation=g, rank=rank, size=size, step=state.step, digest=str(state.weight.tolist()))
    while state.step < args.steps:
        if [int(slot), state.step] == args.die and incarnation == "1":
            note("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        seen = exchange(group, pair, torch.full((4,), float(state.step)))
        total = torch.ones(4)
        dist.all_reduce(total)
        dist.all_reduce(total, dist.ReduceOp.MAX, group=half)
        unlisted.barrier().wait()
        for dimension in mesh.mesh_dim_names if mesh is not None else ():
            dist.all_reduce(total, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        state.weight += total / size + seen
        state.step += 1
        time.sleep(0.01)
        state.commit()
        note("commit", generation=g, rank=rank, step=state.step)
    return state.step


result = train(state)
note("final", generation=elastic.generation(), rank=elastic.rank(), step=result, digest=str(state.weight.tolist()))
