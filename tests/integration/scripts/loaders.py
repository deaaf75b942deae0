"""Trains with a loader that is a value of the state, and logs each sample before the step; see test_loaders.py.

The lines of ``<log>/<host>-<slot>-<incarnation>.jsonl`` are::

    {"what": "enter", "generation": g, "rank": r, "pid": p}
    {"what": "trained", "generation": g, "rank": r, "step": s, "ids": [...]}
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.nodes import Batcher, IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--kind", required=True)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--length", type=Path, help="file with the length of the data set (kind elastic)")
parser.add_argument("--until", type=Path, required=True, help="the job ends when this file exists")
parser.add_argument("--step-seconds", type=float, default=0.02)
args = parser.parse_args()

warnings.filterwarnings("ignore", "'set_vital' is deprecated")
slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
torch.set_num_threads(1)
torch.manual_seed(0)
MANY = 1_000_000


class Stream(IterableDataset[int]):
    """Numbers, divided among the ranks."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < MANY:
            i = self.position + elastic.rank()
            self.position += elastic.size()
            yield i

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make_loader() -> Any:
    if args.kind == "map":
        return StatefulDataLoader(range(MANY), batch_size=4, num_workers=args.workers)  # type: ignore[arg-type]
    if args.kind == "stream":
        return StatefulDataLoader(Stream(), batch_size=4, num_workers=args.workers)
    if args.kind == "nodes":
        return Loader(Batcher(IterableWrapper(range(MANY)), 4))
    return elastic.ElasticDataLoader(range(int(args.length.read_text())), 4, shuffle=False)


model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=make_loader(), step=0)


def note(what: str, **fields: object) -> None:
    where = {"generation": elastic.generation(), "rank": elastic.rank(), "time": time.time()}
    log.write(json.dumps({"what": what, **where, **fields}) + "\n")


def is_last_step() -> bool:
    """Rank 0 checks for the file once per step, and broadcasts that."""
    flag = torch.tensor([int(args.until.exists())])
    dist.broadcast(flag, 0)
    return bool(flag.item())


@elastic.run
def train(state: elastic.TorchState) -> None:
    note("enter", pid=os.getpid())
    ddp = DistributedDataParallel(model, init_sync=False)
    for numbers in state.loader:
        batch = torch.as_tensor(numbers)
        note("trained", step=state.step, ids=batch.tolist())
        optimizer.zero_grad()
        ddp(batch.float()[:, None]).square().mean().backward()
        optimizer.step()
        time.sleep(args.step_seconds)
        state.step += 1
        state.commit()
        if is_last_step():
            return


train(state)
