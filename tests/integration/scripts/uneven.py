"""Ranks with different numbers of batches, in torch's join context; see test_uneven.py.

The lines of ``<log>/<host>-<slot>-<incarnation>.jsonl`` are::

    {"what": "enter" | "commit" | "out" | "joined" | "final", "generation": g, "rank": r, "pid": p, "step": s, ...}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--batches", type=int, nargs="+", required=True, help="of each rank, in turn")
parser.add_argument("--step-seconds", type=float, default=0.02)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--throw", action="store_true", help="throw_on_early_termination")
args = parser.parse_args()

slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
torch.set_num_threads(1)
torch.manual_seed(int(os.environ["ELASTICSTATE_WORKER"].split(":")[1]))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0, batch=0, epoch=0)


def note(what: str, **fields: object) -> None:
    where = {"generation": elastic.generation(), "rank": elastic.rank(), "pid": os.getpid(), "time": time.time()}
    log.write(json.dumps({"what": what, **where, "step": state.step, **fields}) + "\n")


def digest() -> str:
    tensors = [p.detach() for p in model.parameters()]
    tensors += [optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


@elastic.run
def train(state: elastic.TorchState) -> None:
    note("enter", size=elastic.size(), digest=digest())
    ddp = DistributedDataParallel(model, init_sync=False)
    while state.epoch < args.epochs:
        with Join([ddp, state], throw_on_early_termination=args.throw):
            for batch in range(state.batch, args.batches[elastic.rank() % len(args.batches)]):
                generator = torch.Generator().manual_seed(1000 * batch + elastic.rank())
                optimizer.zero_grad()
                ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()
                optimizer.step()
                time.sleep(args.step_seconds)
                state.step += 1
                state.batch += 1
                state.commit()
                note("commit", id=list(state.commits[0]))
            note("out")
        note("joined", digest=digest(), drawn=torch.rand(1).item())
        state.epoch, state.batch = state.epoch + 1, 0
        state.commit()


try:
    train(state)
except RuntimeError as error:
    if not args.throw:
        raise
    note("thrown", text=str(error))
    raise
note("final", digest=digest())
