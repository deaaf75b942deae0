"""A benchmark in the structure of Horovod's elastic synthetic benchmark; see test_horovod_examples.py.

An iteration during which the world changes is measured again from its beginning, as in Horovod's example.

The lines of ``<log>/<pid>.jsonl`` are::

    {"what": "enter" | "commit" | "iter" | "tested" | "final", "generation": g, "rank": r, "step": s, "digest": d, ...}

``step`` counts the batches trained, in a buffer of the model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
import timeit
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

import elasticstate
import elasticstate.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=5)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=1_000_000)
parser.add_argument("--num-batches-per-commit", type=int, default=1)
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True, help="measure until an iteration ends while this file exists")
parser.add_argument("--batch-seconds", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def lr_scaler() -> int:
    return hvd.size()


lr = 0.01
optimizer = optim.SGD(model.parameters(), lr=lr * lr_scaler())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
data = torch.randn(args.batch_size, 32)
target = torch.LongTensor(args.batch_size).random_() % 10
lines = open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    line = {"what": what, "time": time.time(), "pid": os.getpid(), "generation": elasticstate.generation()}
    line |= {"rank": hvd.rank(), "size": hvd.size(), "lr": optimizer.param_groups[0]["lr"]}
    line |= {"step": int(model[1].num_batches_tracked), "iter": state.iter, "img_secs": len(state.img_secs)}
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    line["digest"] = hashlib.sha256(weights).hexdigest()
    lines.write(json.dumps({**line, **fields}) + "\n")


def benchmark_step(state: hvd.elastic.TorchState) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    time.sleep(args.batch_seconds)
    state.batch += 1
    if state.batch == args.num_batches_per_commit:
        state.batch = 0
        state.commit()
        note("commit")


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


log(f"batch size: {args.batch_size}")
log(f"number of CPUs: {hvd.size()}")


@hvd.elastic.run
def run_benchmark(state: hvd.elastic.TorchState) -> None:
    note("enter", warm=state.warm)
    if not state.warm:
        log("running warm-up ...")
        timeit.timeit(lambda: benchmark_step(state), number=args.num_warmup_batches)
        state.warm = True
        state.commit()
    if state.iter == 0:
        log("running benchmark ...")
    for x in range(state.iter, args.num_iters):
        seconds = timeit.timeit(lambda: benchmark_step(state), number=args.num_batches_per_iter)
        img_sec = args.batch_size * args.num_batches_per_iter / seconds
        log(f"iteration {x}: {img_sec:.1f} img/sec per CPU")
        state.img_secs.append(img_sec)
        state.iter = x
        state.commit()
        note("iter", img_sec=img_sec)
        if hvd.broadcast_object(args.stop.exists(), root_rank=0):
            break


def on_state_reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * lr_scaler()


state = hvd.elastic.TorchState(model, optimizer, img_secs=[], iter=0, batch=0, warm=False)
state.register_reset_callbacks([on_state_reset])
run_benchmark(state)

mean, conf = np.mean(state.img_secs), 1.96 * np.std(state.img_secs)
log(f"img/sec per CPU: {mean:.1f} +-{conf:.1f}")
log(f"total img/sec on {hvd.size()} CPUs: {hvd.size() * mean:.1f} +-{hvd.size() * conf:.1f}")
note("tested", measured=state.img_secs, mean=mean, conf=conf)
note("final")
