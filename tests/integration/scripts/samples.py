"""Trains with ElasticDataLoader, and logs each sample before the step that trains on it; see test_samples.py.

The lines of ``<log>/<host>-<slot>-<incarnation>.jsonl`` are::

    {"what": "enter", "generation": g, "rank": r, "pid": p}
    {"what": "trained", "generation": g, "rank": r, "epoch": e, "step": s, "ids": [...]}
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--until", type=Path, required=True, help="the epoch that begins when this file exists is the last")
parser.add_argument("--commit-every", type=int, default=1)
parser.add_argument("--step-seconds", type=float, default=0.01)
parser.add_argument("--batch-size", type=int)
parser.add_argument("--global-batch-size", type=int)
parser.add_argument("--micro-batch-size", type=int)
parser.add_argument("--num-workers", type=int, default=0)
args = parser.parse_args()

slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = elastic.ElasticDataLoader(
    range(args.samples),
    args.batch_size,
    global_batch_size=args.global_batch_size,
    micro_batch_size=args.micro_batch_size,
    num_workers=args.num_workers,
    seed=11,
)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, step=0, last_epoch=-1)


def note(what: str, **fields: object) -> None:
    where = {"generation": elastic.generation(), "rank": elastic.rank(), "time": time.time()}
    log.write(json.dumps({"what": what, **where, **fields}) + "\n")


def is_last_epoch(epoch: int) -> bool:
    """Return True if this epoch is the last one. Rank 0 checks for the file once per epoch, and broadcasts that."""
    if state.last_epoch < 0 and state.loader.consumed == 0:
        flag = torch.tensor([int(args.until.exists())])
        dist.broadcast(flag, 0)
        if flag.item():
            state.last_epoch = epoch
    return bool(state.last_epoch == epoch)


@elastic.run
def train(state: elastic.TorchState) -> None:
    note("enter", pid=os.getpid())
    ddp = DistributedDataParallel(model, init_sync=False)
    for epoch in state.loader.epochs(1_000_000):
        is_last = is_last_epoch(epoch)
        for batch in state.loader:
            ids = batch.tolist() if state.loader.weight else []
            note("trained", epoch=epoch, step=state.step, ids=ids)
            with state.loader.accumulate(ddp):
                (ddp(batch.float()[:, None]).square().mean() * state.loader.weight).backward()
            if state.loader.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(args.step_seconds)
                state.step += 1
                state.commit(every=args.commit_every)
        if is_last:
            return


train(state)
