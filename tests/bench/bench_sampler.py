"""Cost to begin an epoch and to draw its indices, compared in the same run with torch's DistributedSampler.

ElasticSampler and ElasticDataLoader compute the order position by position; torch draws a permutation and makes a list
of it. 4 ranks, rank 0 is measured, the systems alternate. Goals are ratios to torch's figures of the same round, so
load on the machine does not cause misses. Prints markdown. Exits with 1 if a goal is missed.
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
from typing import NamedTuple

import torch
from torch.utils.data import DistributedSampler

import elasticstate as elastic

RANKS = 4
TORCH = "torch DistributedSampler"
GOAL_BEGIN, GOAL_MEMORY, GOAL_EPOCH = 0.05, 0.01, 1.5  # ratios to torch: time and memory to begin; speed


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def exhaust(indices: Iterator[int], count: int) -> None:
    for _ in islice(indices, count):
        pass


class Figures(NamedTuple):
    """Figures of one system in one round."""

    samples: int
    begin_ms: float  # to begin an epoch, first index included
    begin_mb: float
    drawn: float  # indices per second after that

    @property
    def epoch_drawn(self) -> float:
        """Indices per second over a whole epoch, including its start."""
        count = self.samples // RANKS
        return count / (self.begin_ms / 1e3 + count / self.drawn)


def measure(sampler: elastic.ElasticSampler | DistributedSampler[int], draws: int, epoch: int) -> Figures:
    before, started = resident_mb(), time.perf_counter()
    sampler.set_epoch(epoch)
    indices = iter(sampler)
    next(indices)
    begin_ms, begin_mb = (time.perf_counter() - started) * 1e3, resident_mb() - before
    started = time.perf_counter()
    exhaust(indices, draws)
    return Figures(len(sampler.dataset), begin_ms, begin_mb, draws / (time.perf_counter() - started))


def ratios(ours: list[Figures], torchs: list[Figures]) -> tuple[float, float, float]:
    """Return time and memory to begin an epoch, and speed over an epoch, as ratios to torch's figures."""
    pairs = list(zip(ours, torchs, strict=True))
    return (
        median(our.begin_ms / its.begin_ms for our, its in pairs),
        median(our.begin_mb for our, _ in pairs) / median(its.begin_mb for _, its in pairs),
        median(our.epoch_drawn / its.epoch_drawn for our, its in pairs),
    )


def is_missed(begin: float, memory: float, epoch: float) -> bool:
    return begin > GOAL_BEGIN or memory > GOAL_MEMORY or epoch < GOAL_EPOCH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--samples-of-torch", type=int, default=10**7, help="10**9 would take it 40 GB")
    parser.add_argument("--draws", type=int, default=2_000_000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Medians of {args.runs} runs, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}\n")
    rank, size = (lambda: 0), (lambda: RANKS)
    systems: dict[str, elastic.ElasticSampler | DistributedSampler[int]] = {
        "ElasticSampler": elastic.ElasticSampler(range(args.samples), rank=rank, size=size),
        "the same, 2**30 + 1": elastic.ElasticSampler(range(2**30 + 1), rank=rank, size=size),
        TORCH: DistributedSampler(range(args.samples_of_torch), RANKS, 0),  # type: ignore[arg-type]
    }
    found: dict[str, list[Figures]] = {name: [] for name in systems}
    for sampler in systems.values():
        exhaust(iter(sampler), 1)  # run the one-time initialisation
    for epoch in range(1, args.runs + 1):
        for name, sampler in systems.items():
            found[name].append(measure(sampler, min(args.draws, len(sampler) - 1), epoch))
    print("| | samples | begin an epoch | of torch's | memory for it | of torch's | indices per second | ", end="")
    print("over an epoch, of torch's |\n|---|---|---|---|---|---|---|---|")
    missed = False
    for name, rounds in found.items():
        _, begin_ms, begin_mb, drawn = map(median, zip(*rounds, strict=True))
        begin, memory, whole = ratios(rounds, found[TORCH])
        cells = [name, f"{rounds[0].samples:,}", f"{begin_ms:.2f} ms", f"{begin:.4f}", f"{begin_mb:.2f} MB"]
        cells += [f"{memory:.4f}", f"{drawn / 1e6:.1f} M", f"{whole:.2f}"]
        print(f"| {' | '.join(cells)} |")
        missed |= name != TORCH and is_missed(begin, memory, whole)
    print(f"\nGoals: begin ≤ {GOAL_BEGIN:g} and memory ≤ {GOAL_MEMORY:g} of torch's, an epoch ≥ {GOAL_EPOCH:g}.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
