"""A training script whose state changes in all ways, drawn from a seed; see test_programs.py.

Values change their size, shape and dtype at each step, a buffer is None at times, the optimizer state is sometimes
cleared, and reset callbacks change learning rates. The lines of ``<log>/<host>-<slot>-<incarnation>.jsonl`` are::

    {"what": "enter" | "backward" | "commit" | "out" | "final", "generation": g, "rank": r, "pid": p, "step": s, ...}

``backward``: step s has been computed, so ``commit()`` of step s has returned on all members that train.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True, help="train to the end of the epoch in which this file appears")
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--uneven", action="store_true", help="ranks have different numbers of batches, in torch's Join")
parser.add_argument("--commit-every", type=int, default=1)
parser.add_argument("--step-seconds", type=float, default=0.02)
args = parser.parse_args()

EPOCH = 60  # steps
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)

worker = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{worker}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
torch.set_num_threads(1)
torch.manual_seed(os.getpid())  # newcomers start with other weights


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.register_buffer("late", None)
        self.register_buffer("rows", torch.ones(1, 3).expand(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late is None and not args.uneven:
            self.late = torch.full((state.step % 5,), float(state.step))
        return self.layers(x) * self.rows[0, 0]


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = elastic.TorchState(
    model=model, optimizer=optimizer, step=0, batch=0, epoch=0, is_last=False, ballast=torch.zeros(0), odd={}
)


def shrink() -> None:
    """Reset callback that depends on the state that it finds."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.97


def follow_size() -> None:
    """Reset callback that depends on the world."""
    for group in optimizer.param_groups:
        group["momentum"] = 0.9 / elastic.size()
    state.odd["size"] = elastic.size()


state.register_reset_callbacks([shrink, follow_size])


def note(what: str, **fields: object) -> None:
    where = {"generation": elastic.generation(), "rank": elastic.rank(), "pid": os.getpid(), "time": time.time()}
    log.write(json.dumps({"what": what, **where, "step": state.step, **fields}) + "\n")


def digest() -> str:
    """Return a hash of the content of a commit, without the random states, which differ by rank."""
    found: list[Any] = [state.step, state.batch, state.epoch, state.is_last, sorted(state.odd.items())]
    tensors = {**dict(model.named_parameters()), **dict(model._buffers), "ballast": state.ballast}
    for i, parameter in enumerate(model.parameters()):
        tensors |= {f"{i}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    found += [sorted((k, v) for k, v in group.items() if k != "params") for group in optimizer.param_groups]
    for name, tensor in sorted(tensors.items()):
        found.append((name, None if tensor is None else (tensor.dtype, tensor.tolist())))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def change() -> None:
    """Give the values other sizes, shapes and dtypes, the same on all ranks."""
    random = Random(f"{args.seed} {state.step}")
    state.ballast = torch.full((random.choice((0, 1, 7, 1000)), random.choice((1, 3))), state.step % 100).to(
        random.choice(DTYPES)
    )
    if state.step % 2:  # every second commit is 3 MB larger
        state.ballast = torch.full((3 << 20,), state.step % 100, dtype=torch.uint8)
    state.odd = {"text": "x" * random.randrange(10_000), "of": state.step, "size": state.odd.get("size")}
    if state.step % 11 == 0:
        optimizer.state.clear()
    if state.step % 2 == 0 and not args.uneven:  # until the next forward pass, which a rank inside Join does not make
        model.late = None


def one_step(ddp: torch.nn.Module) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1000 * state.step + elastic.rank())
    ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()
    note("backward")
    optimizer.step()
    time.sleep(args.step_seconds)
    state.step += 1
    state.batch += 1
    change()
    before = state.commits[0]
    state.commit(every=args.commit_every)
    if state.commits[0] != before:
        note("commit")


def steps_of_epoch() -> int:
    """Return the number of steps. In an uneven epoch rank 0 trains alone at the end; the last rank runs out first."""
    return EPOCH - (15 * elastic.rank() if args.uneven else 0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    note("enter", size=elastic.size(), digest=digest())
    ddp = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
    while not state.is_last:
        with Join([ddp, state]) if args.uneven else nullcontext():
            while state.batch < steps_of_epoch():
                one_step(ddp)
            note("out")
        state.batch, state.epoch = 0, state.epoch + 1
        flag = torch.tensor([int(args.stop.exists())])
        dist.broadcast(flag, 0)
        state.is_last = bool(flag.item())
        state.commit()


train(state)
note("final", digest=digest())
