"""Cost of a training step with DistributedOptimizer of elasticstate.horovod, compared with DistributedDataParallel.

The workers of one elasticrun job train the same perceptrons with both alternately: one of few large parameters, and one
of many small ones. Rank 0 is measured. Prints markdown. Exits with 1 if a goal is missed.
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

RANKS = (2, 4)
MODELS = ((24, 384), (250, 120))  # layers, and their width: 48 and 500 parameters, together about as large
BATCH = 64
GOAL = 1.1


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Callable[[], None]:
    batch = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(hvd.rank()))

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
    hvd.barrier()  # joins the world
    if hvd.rank() == 0 and hvd.size() == RANKS[0]:
        print(f"Medians of {rounds} rounds of {steps} steps by turns, workers of one thread, {os.cpu_count()} cores, ")
        print(f"{platform.machine()}, torch {torch.__version__}. Goal: {GOAL:g} of DDP's.\n")
        print("| workers | parameters | DDP | DistributedOptimizer | of DDP's | lowest and highest round |")
        print("|---|---|---|---|---|---|", flush=True)
    missed = [compare(layers, width, rounds, steps) for layers, width in MODELS]
    return int(any(missed))


def compare(layers: int, width: int, rounds: int, steps: int) -> bool:
    """Print a row. Return True if the goal is missed."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    mine = nn.Sequential(*parts)
    theirs = copy.deepcopy(mine)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.01, momentum=0.9))
    ddp = DistributedDataParallel(theirs)
    systems = [
        make_step(ddp, torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9), width),
        make_step(mine, optimizer, width),
    ]
    for step in systems:
        milliseconds(step, steps)
    found: list[list[float]] = [[], []]
    for turn in range(rounds):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            found[i].append(milliseconds(systems[i], steps))
    ratios = [ours / bare for bare, ours in zip(*found, strict=True)]
    ratio = median(ratios)
    if hvd.rank() == 0:
        print(
            f"| {hvd.size()} | {2 * layers} | {median(found[0]):.1f} ms | {median(found[1]):.1f} ms | {ratio:.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} |",
            flush=True,
        )
    return hvd.rank() == 0 and ratio > GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.rounds, args.steps)
    command = [sys.executable, __file__, "--worker", "--rounds", str(args.rounds), "--steps", str(args.steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    statuses = []
    for ranks in RANKS:
        elasticrun = [sys.executable, "-m", "elasticstate", "-np", str(ranks)]
        job = [*elasticrun, "--reset-limit", "0", "--", *command]
        statuses.append(subprocess.run(job, env=environment, check=False).returncode)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
