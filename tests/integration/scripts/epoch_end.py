"""A training with code after the loop of each epoch. A worker is killed at the end of epoch 1."""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--place", choices=["loop", "commit"], required=True, help="what has just ended at the kill")
parser.add_argument("--commits", choices=["every_batch", "not_the_last", "none"], required=True, help="in the loop")
parser.add_argument("--counter", action="store_true", help="use a counter of the state, not epochs()")
args = parser.parse_args()

model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
loader = elastic.ElasticDataLoader(range(40), global_batch_size=8)
state = elastic.TorchState(
    model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=0, batches=0, ends=[]
)


def may_die(place: str, epoch: int) -> None:
    if (place, epoch, elastic.generation(), elastic.rank()) == (args.place, 1, 1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def train_epoch(state: elastic.TorchState, ddp: DistributedDataParallel, epoch: int) -> None:
    while epoch == 2 and elastic.size() == 1:  # the newcomer would divide this epoch if it came later
        state.check_host_updates()
    batches = 0
    for batch in state.loader:
        optimizer.zero_grad()
        ddp(batch.float()[:, None]).mean().backward()
        optimizer.step()
        batches += 1
        state.batches += 1
        if args.commits == "every_batch" or (args.commits == "not_the_last" and state.loader.steps_left):
            state.commit()
    may_die("loop", epoch)
    if elastic.rank() == 0:
        print(f"epoch {epoch}: {batches} batches of {len(state.loader)}", flush=True)
    scheduler.step()
    state.ends = [*state.ends, (epoch, state.batches)]
    state.batches = 0
    state.epoch = epoch + 1
    state.commit()
    may_die("commit", epoch)


@elastic.run
def train(state: elastic.TorchState) -> None:
    ddp = DistributedDataParallel(model, init_sync=False)
    if args.counter:
        for epoch in range(state.epoch, 3):
            state.loader.set_epoch(epoch)
            train_epoch(state, ddp, epoch)
    else:
        for epoch in state.loader.epochs(3):
            train_epoch(state, ddp, epoch)


train(state)
if elastic.rank() == 0:
    print(f"ends {state.ends}, {scheduler.last_epoch} steps of the scheduler", flush=True)
