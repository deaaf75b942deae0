"""Cost of a training step with DistributedOptimizer of elasticstate.horovod, compared with DistributedDataParallel.

2 workers of one elasticrun job train the same perceptron with both alternately; rank 0 is measured. Prints markdown.
Exits with 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticstate.horovod as hvd

RANKS, WIDTH, LAYERS, BATCH = 2, 384, 24, 64
GOAL = 1.3


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(hvd.rank()))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None], steps: int) -> float:
    hvd.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps * 1e3


def worker(rounds: int, steps: int) -> int:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.barrier()  # joins the world
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    mine, theirs = model, copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.01, momentum=0.9))
    ddp = DistributedDataParallel(theirs)
    systems = {
        "DistributedDataParallel": make_step(ddp, torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9)),
        "DistributedOptimizer": make_step(mine, optimizer),
    }
    for step in systems.values():
        milliseconds(step, steps)
    found: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds):
        for name in sorted(systems, reverse=turn % 2 == 1):
            found[name].append(milliseconds(systems[name], steps))
    if hvd.rank() != 0:
        return 0
    parameters = list(model.parameters())
    print(
        f"Medians of {rounds} rounds of {steps} steps, {RANKS} workers of one thread, {len(parameters)} parameters of "
        f"{sum(p.nbytes for p in parameters) / 1e6:.1f} MB together, {os.cpu_count()} cores, {platform.machine()}, "
        f"torch {torch.__version__}\n"
    )
    bare = median(found["DistributedDataParallel"])
    ratios = [a / b for a, b in zip(found["DistributedOptimizer"], found["DistributedDataParallel"], strict=True)]
    print("| | step | of DDP's | lowest and highest round |\n|---|---|---|---|")
    print(f"| DistributedDataParallel | {bare:.1f} ms | 1.00 | |")
    print(
        f"| DistributedOptimizer | {median(found['DistributedOptimizer']):.1f} ms | {median(ratios):.2f} | "
        f"{min(ratios):.2f} to {max(ratios):.2f} |"
    )
    print(f"\nGoal: {GOAL:g} of DDP's.", flush=True)
    return int(median(ratios) > GOAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.rounds, args.steps)
    command = [sys.executable, __file__, "--worker", "--rounds", str(args.rounds), "--steps", str(args.steps)]
    elasticrun = [sys.executable, "-m", "elasticstate", "-np", str(RANKS), "--no-tag-output", "--max-no-progress", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*elasticrun, "--", *command], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
