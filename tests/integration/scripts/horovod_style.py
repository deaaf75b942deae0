"""Training in Horovod's style, with ``import elasticstate.horovod as hvd`` as its import; see test_horovod.py.

The lines of ``<log>/<pid>.jsonl`` are::

    {"what": "start" | "enter" | "epoch" | "final", "generation": g, "rank": r, "size": n, "lr": l, "digest": d, ...}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticstate
import elasticstate.horovod as hvd

SAMPLES, BATCH, LR, COMMIT_EVERY = 96, 4, 0.01, 2

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, help="train until an epoch ends with this file there")
parser.add_argument("--step-seconds", type=float, default=0.01)
parser.add_argument("--dies-at", type=int, default=-1, help="rank 1 of the first world kills itself in this batch")
parser.add_argument("--inelastic", action="store_true")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=LR * hvd.size())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
log = open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    tensors = [*model.parameters(), *(v for entry in optimizer.state.values() for v in entry.values())]
    line = {
        "what": what,
        "time": time.time(),
        "generation": elasticstate.generation(),
        "rank": hvd.rank(),
        "size": hvd.size(),
        "lr": optimizer.param_groups[0]["lr"],
        "digest": hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest(),
    }
    log.write(json.dumps({**line, **fields}) + "\n")


def die(gradient: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_batch(x: torch.Tensor, y: torch.Tensor, dies: bool = False) -> torch.Tensor:
    optimizer.zero_grad()
    middle = model[:3](x)
    if dies:
        middle.register_hook(die)  # while the gradients of the last layer are being reduced
    loss = nn.functional.mse_loss(model[3:](middle), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> float:
    note("enter", epoch=state.epoch, batch=state.batch)
    loss = torch.zeros(())
    while True:
        state.sampler.set_epoch(state.epoch)
        for i, (x, y, index) in enumerate(loader):
            dies = elasticstate.generation() == 1 and hvd.rank() == 1 and state.batch == args.dies_at
            loss = train_batch(x, y, dies)
            time.sleep(args.step_seconds)
            state.seen += hvd.allreduce(torch.bincount(index, minlength=SAMPLES), op=hvd.Sum)
            state.sampler.record_batch(i, BATCH)
            state.batch += 1
            if state.batch % COMMIT_EVERY == 0:
                state.commit()
            else:
                state.check_host_updates()
        scheduler.step()
        note("epoch", epoch=state.epoch, seen=state.seen.tolist(), loss=hvd.allreduce(loss).item())
        state.epoch += 1
        state.seen.zero_()
        is_over = hvd.broadcast_object(args.stop.exists(), root_rank=0)
        state.commit()
        if is_over:
            return loss.item()


def on_state_reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = LR * hvd.size()


note("start")
if args.inelastic:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y, _ in loader:
            train_batch(x, y)
else:
    state = hvd.elastic.TorchState(
        model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, batch=0, seen=torch.zeros(SAMPLES).long()
    )
    state.register_reset_callbacks([on_state_reset])
    train(state)
note("final")
