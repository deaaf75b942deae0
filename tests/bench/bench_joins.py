"""Largest gap between two steps of the old workers while a fourth worker joins three. The systems run alternately.

The training is that of bench_recovery.py: 80 MB of state, a commit at every step.

- floor: bare Gloo without a framework (floor_worker.py).
- elasticstate: elasticrun (elastic_worker.py).
- torchft: one replica group per worker, Gloo, a lighthouse (torchft_worker.py). Needs ``--torchft PYTHON``, an
  interpreter that has torchft and the same torch.

Prints markdown. With torchft, exits with 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from bench_recovery import (
    CHANGE_AT,
    HERE,
    STEPS_AFTER,
    Figures,
    elastic_join,
    floor_join,
    free_port,
    read_steps,
    row,
    started,
    wait_for_step,
)

OLD = 3  # workers before the join
GOAL = 0.9  # of torchft's gap
LIGHTHOUSE = ["--min_replicas", 1, "--quorum_tick_ms", 100, "--join_timeout_ms", 10000]  # those of torchft's README


def torchft_join(python: Path, folder: Path, phase: float, figures: Figures) -> None:
    address = f"127.0.0.1:{free_port()}"
    lighthouse = [python.with_name("torchft_lighthouse"), *LIGHTHOUSE, "--bind", address]
    script = [python, HERE / "torchft_worker.py", "--folder", folder, "--size", OLD + 1, "--steps-after", STEPS_AFTER]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(lighthouse, folder, -signal.SIGTERM))
        stack.callback(server.terminate)  # after all replicas have ended

        def start(replica: int) -> None:
            variables = {"TORCHFT_LIGHTHOUSE": f"http://{address}"}
            jobs.append(stack.enter_context(started([*script, "--replica", replica], folder, **variables)))

        jobs: list[object] = []
        for replica in range(OLD):
            start(replica)
        wait_for_step(folder, CHANGE_AT, 0, server)
        start(OLD)
    gaps = []
    for steps in read_steps(folder).values():
        first = next(i for i, step in enumerate(steps) if step.generation == 2)
        if steps[0].rank < OLD:
            around = steps[max(0, first - 3) : first + 4]
            gaps.append(max(b.end_ns - a.end_ns for a, b in pairwise(around)) / 1e6)
    figures["torchft", "pause"].append(max(gaps))


def note_step(system: str, folder: Path, figures: Figures) -> None:
    """Record the median step before the join and after it."""
    for generation, name in ((1, "step before"), (2, "step after")):
        steps = next(steps for steps in read_steps(folder).values() if steps[0].rank == 0 and steps[0].generation == 1)
        ends = [step.end_ns for step in steps if step.generation == generation][2:]
        figures[system, name].append(median(b - a for a, b in pairwise(ends)) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--torchft", type=Path, help="interpreter that has torchft")
    args = parser.parse_args()
    systems: dict[str, Callable[[Path, float, Figures], None]] = {"floor": floor_join, "elasticstate": elastic_join}
    if args.torchft is not None:
        systems["torchft"] = functools.partial(torchft_join, args.torchft)
    figures: Figures = defaultdict(list)
    for run in range(args.runs):
        for system, join in systems.items():
            print(f"run {run + 1} of {args.runs}: {system}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir="/dev/shm") as folder:
                join(Path(folder), run / args.runs, figures)
                note_step(system, Path(folder), figures)
    cores = len(os.sched_getaffinity(0))
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores; medians of {args.runs} runs.\n"
    )
    row("system", "largest gap", "step before", "step after")
    row(*["---"] * 4)
    for system in systems:
        row(system, *(f"{median(figures[system, name]):.0f} ms" for name in ("pause", "step before", "step after")))
    if "torchft" in systems:
        ratio = median(figures["elasticstate", "pause"]) / median(figures["torchft", "pause"])
        print(f"\nGap: {ratio:.2f} of torchft's (goal: at most {GOAL:g}).")
        if ratio > GOAL:
            sys.exit(1)


if __name__ == "__main__":
    main()
