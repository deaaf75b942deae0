"""The training script of the fault tests: tiny, deterministic, and it logs every action.

Faults are data: ``--fault kill@40:rank=1`` (what, at which step, which rank). Each fault fires once in the whole job,
and leaves a file in the log directory as proof. The lines of ``<log>/<host>-<slot>-<incarnation>.jsonl`` are::

    {"what": "enter" | "step" | "commit" | "callback" | "gate" | "final", "generation": g, "rank": r, "step": s, ...}
"""

from __future__ import annotations

import fast_import  # noqa: F401  # isort: skip - first

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import slow_device
import torch
import torch.distributed as dist
from faults import Fault, Faults
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic
from elasticstate.state.base import committer_of


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--commit-every", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, help="pause after a step; 0.03, and 0.06 with --until")
    parser.add_argument("--fault", action="append", default=[], type=Fault.parse)
    parser.add_argument("--faults-file", type=Path, help="more faults, which may be written while the job runs")
    parser.add_argument("--wrap", action="store_true", help="wrap every exception in one of our own")
    parser.add_argument("--zero-grad-last", action="store_true")
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--digests", action="store_true", help="log each step, with the weights after it")
    parser.add_argument("--evaluate", type=float, default=0.0, help="seconds after step 5, with state.progress()")
    parser.add_argument("--ballast", type=int, default=0, help="megabytes more in the state")
    parser.add_argument("--slow-device", type=float, help="tensors are on one that copies one each so many seconds")
    parser.add_argument("--misfit", action="store_true", help="another model in each process of a slot")
    parser.add_argument("--more", action="append", default=[], help="beginning of the workers with one more value")
    parser.add_argument("--boot-until", type=Path, help="become ready only when this file exists")
    parser.add_argument("--until", type=Path, help="train on until this file exists, then --steps steps more")
    parser.add_argument("--metric", action="append", default=[], help="name of a metric: the number of the step")
    return parser.parse_args()


args = options()
slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
if args.slow_device:
    slow_device.use(slow_device.SlowDevice(args.slow_device))
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
faults = Faults(args.fault, args.log, args.faults_file)
pace_s = args.step_seconds if args.step_seconds is not None else 0.06 if args.until else 0.03


def note(what: str, **fields: object) -> None:
    log.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **fields}) + "\n")


class Wrapped(Exception):
    """An exception that a framework on top of torch might raise instead."""


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = [p.detach() for p in model.parameters()]
    state += [optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state)).hexdigest()


faults.at("import")
while args.boot_until and not args.boot_until.exists():
    time.sleep(0.02)
torch.manual_seed(int(os.environ["ELASTICSTATE_WORKER"].rsplit(":", 2)[1]) + 1)  # newcomers start with other weights
torch.set_num_threads(1)
width = 16 + (int(slot_id.rpartition("-")[2]) if args.misfit else 0)
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
more = {"scheduler": 0} if slot_id.startswith(tuple(args.more)) else {}
ballast = torch.zeros(args.ballast << 18)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0, until=-1, ballast=ballast, **more)
faults.arm()


def on_change() -> None:
    faults.at("callback", rank=elastic.rank(), step=state.step)
    note("callback", generation=elastic.generation(), rank=elastic.rank(), step=state.step)


if args.callback:
    state.register_reset_callbacks([on_change])


def one_step(ddp: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1000 * state.step + elastic.rank())
    x = torch.randn(4, 8, generator=generator)
    if not args.zero_grad_last:
        optimizer.zero_grad()
    loss = ddp(x).square().mean()
    faults.at("backward", rank=elastic.rank(), step=state.step)
    loss.backward()
    optimizer.step()
    if args.zero_grad_last:
        optimizer.zero_grad()


def evaluate(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state.progress()
        time.sleep(0.1)


def done() -> bool:
    """Return True at the same step on all ranks. Rank 0 checks for the file every 10 steps, and broadcasts that."""
    if args.until is None:
        return state.step >= args.steps
    if state.until < 0 and state.step % 10 == 0:
        flag = torch.tensor([int(args.until.exists())])
        dist.broadcast(flag, 0)
        if flag.item():
            state.until = state.step + args.steps
    return 0 <= state.until <= state.step


@elastic.run
def train(state: elastic.TorchState) -> int:
    g, rank = elastic.generation(), elastic.rank()
    here = {"size": elastic.size(), "backend": dist.get_backend()}
    follows = committer_of(state).session.view.follows
    note("enter", generation=g, rank=rank, step=state.step, digest=digest(model, optimizer), follows=follows, **here)
    faults.at("new_group", rank=rank, step=state.step)
    if faults.have("new_group"):
        pair = dist.new_group(list(range(elastic.size())))
        dist.all_reduce(torch.ones(1), group=pair)
    ddp = DistributedDataParallel(model, init_sync=False)
    steps: dict[tuple[int, int], int] = {}  # commit id -> step
    try:
        while not done():
            faults.at("step", rank=elastic.rank(), step=state.step)
            one_step(ddp)
            time.sleep(pace_s)
            state.step += 1
            for name in args.metric:
                elastic.report_metric(name, state.step)
            if args.digests:
                note("step", generation=g, rank=rank, step=state.step, digest=digest(model, optimizer))
            if state.step == 5:
                evaluate(args.evaluate)
            before = state.commits[0]
            steps[g, committer_of(state).session.ticks + 1] = state.step
            state.commit(every=args.commit_every)
            newest = state.commits[0]
            if (
                follows is not None and committer_of(state).session.ticks % args.commit_every == 0
            ):  # the keeper seals it
                note("commit", generation=g, rank=rank, step=state.step, id=[g, committer_of(state).session.ticks])
            elif newest != before:  # the newest sealed commit may be that of an earlier step
                note("commit", generation=g, rank=rank, step=steps.get(newest, state.step), id=list(newest))
    except Exception as error:
        if args.wrap:
            raise Wrapped("training went wrong") from error
        raise
    faults.at("gate", rank=rank, step=state.step)
    note("gate", generation=g, rank=rank, step=state.step)
    return state.step


result = train(state)
note("final", generation=elastic.generation(), rank=elastic.rank(), step=result, digest=digest(model, optimizer))
leftover = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
if leftover:
    sys.exit(f"threads left: {leftover}")
