"""What it costs to begin an epoch and to draw its indices, next to torch's DistributedSampler in the same run.

ElasticSampler and ElasticDataLoader compute the order position by position; torch draws a permutation, and makes a list
of it. 4 ranks, rank 0 is measured. Prints markdown; exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator
from itertools import islice
from statistics import median

import torch
from torch.utils.data import DistributedSampler

import elasticstate as elastic

RANKS = 4
GOAL_BEGIN_MS, GOAL_BEGIN_MB, GOAL_DRAWN = 50.0, 1.0, 5e6


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def exhaust(indices: Iterator[int], count: int) -> None:
    for _ in islice(indices, count):
        pass


def measure(
    sampler: elastic.ElasticSampler | DistributedSampler[int], draws: int, epoch: int
) -> tuple[float, float, float]:
    """Milliseconds and megabytes to begin an epoch and give its first index; indices per second after that."""
    exhaust(iter(sampler), 1)  # whatever is made once
    before, started = resident_mb(), time.perf_counter()
    sampler.set_epoch(epoch)
    indices = iter(sampler)
    next(indices)
    begin_ms, begin_mb = (time.perf_counter() - started) * 1e3, resident_mb() - before
    started = time.perf_counter()
    exhaust(indices, draws)
    return begin_ms, begin_mb, draws / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--samples-of-torch", type=int, default=10**7, help="10**9 would take it 40 GB")
    parser.add_argument("--draws", type=int, default=2_000_000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Medians of {args.runs} runs, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}\n")
    print("| | samples | begin an epoch | memory for it | indices per second |\n|---|---|---|---|---|")
    rank, size = (lambda: 0), (lambda: RANKS)
    systems = {
        "ElasticSampler": (args.samples, elastic.ElasticSampler(range(args.samples), rank=rank, size=size)),
        "the same, 2**30 + 1": (2**30 + 1, elastic.ElasticSampler(range(2**30 + 1), rank=rank, size=size)),
        "torch DistributedSampler": (
            args.samples_of_torch,
            DistributedSampler(range(args.samples_of_torch), RANKS, 0),  # type: ignore[arg-type]
        ),
    }
    missed = False
    for name, (samples, sampler) in systems.items():
        draws = min(args.draws, samples // RANKS - 1)
        found = [measure(sampler, draws, epoch) for epoch in range(1, args.runs + 1)]
        begin_ms, begin_mb, drawn = map(median, zip(*found, strict=True))
        print(f"| {name} | {samples:,} | {begin_ms:.2f} ms | {begin_mb:.2f} MB | {drawn / 1e6:.1f} M |", flush=True)
        if isinstance(sampler, elastic.ElasticSampler):
            missed |= begin_ms > GOAL_BEGIN_MS or begin_mb > GOAL_BEGIN_MB or drawn < GOAL_DRAWN
    print(f"\nGoals: {GOAL_BEGIN_MS:g} ms, {GOAL_BEGIN_MB:g} MB, {GOAL_DRAWN / 1e6:g} M per second.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
