"""A training script whose workers kill themselves at exact points of a step; see test_ticks.py.

``--kill 2:in_step:4:0``: in generation 2, at the point ``in_step`` of the tick 4, rank 0 kills itself. At the points
after the all-reduce it first waits until all other ranks have passed theirs, so the survivors complete the tick. The
lines of ``<log>/<host>-<slot>-<incarnation>.jsonl`` are::

    {"what": "enter" | "kill" | "final", "generation": g, "rank": r, "pid": p, "step": s, "digest": d}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic
from elasticstate.state import rng
from elasticstate.state.snapshot import Snapshot

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--program", choices=("scaled", "several", "closure"), required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--commit-every", type=int, required=True)
parser.add_argument("--kill", action="append", default=[])
args = parser.parse_args()

KILLS = {
    int(generation): (point, int(tick), int(rank))
    for generation, point, tick, rank in (text.split(":") for text in args.kill)
}
AFTER_THE_ALL_REDUCE = ("before_step", "in_step", "after_step", "record", "commit")

worker = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{worker}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
torch.set_num_threads(1)
is_new = True  # this process has not trained yet


def seed(*values: object) -> None:
    number = int(hashlib.sha256(repr(values).encode()).hexdigest()[:7], 16)
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


seed(worker)  # newcomers start with other weights


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 1)
        )
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        middle = self.layers[:4](x)
        at("forward")
        return self.layers[4:](middle) * (1 + 0.001 * self.passes)


def optimizers() -> list[torch.optim.Optimizer]:
    first, last = [*model.layers[0].parameters(), *model.layers[1].parameters()], model.layers[4:].parameters()
    if args.program == "scaled":
        return [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)]
    if args.program == "several":
        return [torch.optim.SGD(first, lr=0.01, momentum=0.9, foreach=True), torch.optim.AdamW(last, fused=True)]
    return [torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2, history_size=3)]


model = Model()
several = optimizers()
if args.program == "scaled":
    several[0].register_step_pre_hook(lambda *_: at("in_step"))
schedule = torch.optim.lr_scheduler.ExponentialLR(several[0], 0.98)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=args.program == "scaled")
state = elastic.TorchState(
    model=model, schedule=schedule, scaler=scaler, step=0, noise=[],
    **{f"optimizer{i}": optimizer for i, optimizer in enumerate(several)},
)  # fmt: skip
ticks = 0  # of this generation


def note(what: str, **fields: object) -> None:
    where = {"generation": elastic.generation(), "rank": elastic.rank(), "pid": os.getpid(), "time": time.time()}
    log.write(json.dumps({"what": what, **where, "step": state.step, **fields}) + "\n")


def digest() -> str:
    """Return a hash of all that is equal on all ranks."""
    tensors = list(model.parameters())
    for optimizer in several:
        tensors += [t for p in model.parameters() for t in _tensors(optimizer.state.get(p, {}))]
    values = [tensor.tolist() for tensor in tensors]
    plain = [state.step, scaler.state_dict(), [group["lr"] for o in several for group in o.param_groups]]
    return hashlib.sha256(repr((values, plain)).encode()).hexdigest()


def _tensors(entry: dict[str, Any]) -> list[torch.Tensor]:
    return [value for _, value in sorted(entry.items()) if isinstance(value, torch.Tensor)]


def marker(rank: int) -> Path:
    return args.log / f"reduced-{elastic.generation()}-{ticks + 1}-{rank}"


def at(point: str) -> None:
    """Kill this process if this is the point."""
    generation = elastic.generation()
    if KILLS.get(generation) != (point, ticks + 1, elastic.rank()):
        return
    if point in AFTER_THE_ALL_REDUCE:
        others = [rank for rank in range(elastic.size()) if rank != elastic.rank()]
        while not all(marker(rank).exists() for rank in others):
            time.sleep(0.001)
    note("kill", point=point)
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, point: str) -> None:
    original = getattr(owner, name)

    def struck(*arguments: Any, **keywords: Any) -> Any:
        if is_training:
            at(point)
        return original(*arguments, **keywords)

    setattr(owner, name, struck)


is_training = False
before(rng, "copy", "record")
before(Snapshot, "begin", "commit")


def reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce each bucket as DDP does. The kill comes after the first bucket of a pass."""
    if not bucket.index():
        return _mean(bucket)
    at("all_reduce")
    return _mean(bucket)


reduce.__annotations__.clear()  # DDP does not understand annotations that are text


def _mean(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(elastic.size())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def loss_of(ddp: nn.Module, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * state.step + 10 * elastic.rank() + part)
    noise = random.random() + float(np.random.randn()) + float(torch.rand(()))
    state.noise.append(noise)
    return ddp(torch.randn(6, 8, generator=generator) + 0.01 * noise).square().mean()


def step_scaled(ddp: nn.Module) -> None:
    several[0].zero_grad()
    scaler.scale(loss_of(ddp, 0)).backward()
    reduced()
    scaler.unscale_(several[0])
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(several[0])
    at("after_step")
    scaler.update()


def step_several(ddp: nn.Module) -> None:
    for part in range(3):
        with ddp.no_sync() if part < 2 else nullcontext():
            loss_of(ddp, part).backward()
    reduced()
    several[0].step()
    at("in_step")  # of the two
    several[1].step()
    at("after_step")
    for optimizer in several:
        optimizer.zero_grad(set_to_none=state.step % 2 == 0)


def step_closure(ddp: nn.Module) -> None:
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 2:
            at("second_pass")
        several[0].zero_grad()
        loss = loss_of(ddp, evaluations)
        loss.backward()
        return loss

    several[0].step(closure)
    reduced()
    at("after_step")


def reduced() -> None:
    """Record that this rank has completed the all-reduces of the tick."""
    marker(elastic.rank()).touch()
    at("before_step")


@elastic.run
def train(state: elastic.TorchState) -> None:
    global ticks, is_training, is_new
    if is_new:  # the random state of a killed worker is lost, unless its last commit is the job's newest
        seed(elastic.generation(), elastic.rank())
    ticks, is_new = 0, False
    note("enter", digest=digest(), size=elastic.size())
    ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=1e-4)
    ddp.register_comm_hook(None, reduce)
    step: Callable[[nn.Module], None] = {"scaled": step_scaled, "several": step_several, "closure": step_closure}[
        args.program
    ]
    is_training = True
    while state.step < args.steps:
        step(ddp)
        schedule.step()
        state.step += 1
        state.noise = state.noise[-5:]
        state.commit(every=args.commit_every)
        ticks += 1
    is_training = False


train(state)
note("final", digest=digest())
