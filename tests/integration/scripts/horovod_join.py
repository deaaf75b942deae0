"""Horovod's join() in elastic training: ranks have different numbers of batches in each epoch; see test_horovod.py.

The lines of ``<log>/<pid>.jsonl`` are::

    {"what": "enter" | "joins" | "joined" | "final", "generation": g, "rank": r, "size": n, "digest": d, ...}
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

import elasticstate
import elasticstate.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--kill", choices=["a joined rank", "a training rank"], required=True)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
log = open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    place = {"generation": elasticstate.generation(), "rank": hvd.rank(), "size": hvd.size(), "pid": os.getpid()}
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    log.write(json.dumps({"what": what, "time": time.time(), **place, "digest": digest, **fields}) + "\n")


def lines() -> list[dict[str, object]]:
    return [json.loads(line) for path in args.log.glob("*.jsonl") for line in path.read_text().splitlines()]


def strike(epoch: int, batch: int) -> None:
    """In the first world, after rank 0 has joined: rank 2, which has batches left, kills rank 0 or itself."""
    if (elasticstate.generation(), hvd.rank(), epoch, batch) != (1, 2, 1, 6):
        return
    while not (found := [line for line in lines() if line["what"] == "joins" and line["epoch"] == epoch]):
        time.sleep(0.01)
    victim = found[0]["pid"] if args.kill == "a joined rank" else os.getpid()
    assert isinstance(victim, int)
    note("strikes", epoch=epoch, victim=victim)
    os.kill(victim, signal.SIGKILL)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    note("enter", epoch=state.epoch)
    while state.epoch < args.epochs or hvd.size() < 3:
        for batch in range(3 + 3 * hvd.rank()):
            strike(state.epoch, batch)
            x = torch.randn(4, 4) + batch
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert hvd.allreduce(torch.tensor(batch), op=hvd.Max) == batch
            if batch % 2:
                state.commit()
        note("joins", epoch=state.epoch)
        last = hvd.join()
        assert last == hvd.size() - 1
        state.epoch += 1
        note("joined", epoch=state.epoch)  # before the commit, which may end the generation
        state.commit()
        time.sleep(0.02)  # epochs are short and a newcomer takes seconds: limits the number of log lines


train(hvd.elastic.TorchState(model, optimizer, epoch=0))
note("final", epoch=args.epochs)
