"""Time from the start of a job to its first step, on this machine. The systems run alternately.

Four workers with one thread each and a perceptron of 10.03 M parameters, as in bench_recovery.py.

- python: four processes started by hand at once, with the addresses of each other in their environment (env://).
- torchrun: ``python -m torch.distributed.run --standalone``.
- elasticstate: ``elasticrun -np 4``, which also allocates the commit storage.

A job starts when its command does; the first step is done when the last of the workers has done it. CPU time is that of
all processes of the job, until its end. Parts are those of the slowest worker. Prints markdown. Exits with 1 if
elasticstate is slower than torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from bench_recovery import free_port, read_steps, row, started

SCRIPT = Path(__file__).with_name("startup_worker.py")
WORKERS = 4
PARTS = ("import", "model", "world", "first step")
GOAL = 1.0  # of torchrun's time

Figures = defaultdict[tuple[str, str], list[float]]  # (system, figure) -> one value per run


def run_python(folder: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        for rank in range(WORKERS):
            numbers = {"RANK": rank, "WORLD_SIZE": WORKERS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, SCRIPT, "--folder", folder]
            stack.enter_context(started(command, folder, **{name: str(value) for name, value in numbers.items()}))


def run_torchrun(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", WORKERS]
    with started([*launcher, SCRIPT, "--folder", folder], folder):
        pass


def run_elastic(folder: Path) -> None:
    launcher = [Path(sys.executable).with_name("elasticrun"), "-np", WORKERS, sys.executable, SCRIPT]
    with started([*launcher, "--elastic", "--folder", folder], folder):
        pass


SYSTEMS = {"python": run_python, "torchrun": run_torchrun, "elasticstate": run_elastic}


def cpu_s() -> float:
    """Return the CPU seconds of all ended children and their descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(system: str, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        before_s, start_ns = cpu_s(), time.monotonic_ns()
        SYSTEMS[system](folder)
        figures[system, "CPU"].append(cpu_s() - before_s)
        first = {pid: steps[0].end_ns for pid, steps in read_steps(folder).items()}
        if len(first) != WORKERS:
            raise RuntimeError(f"{system}: {len(first)} of {WORKERS} workers have made a step")
        slowest = max(first, key=lambda pid: first[pid])
        figures[system, "first step at"].append((first[slowest] - start_ns) / 1e9)
        marks = [line.rsplit(" ", 1) for line in (folder / f"{slowest}.marks").read_text().splitlines()]
        last_ns = start_ns
        for part, at in [*marks, ["first step", str(first[slowest])]]:
            figures[system, part].append((int(at) - last_ns) / 1e9)
            last_ns = int(at)


def report(figures: Figures, systems: list[str], runs: int) -> float | None:
    """Print the medians. Return the ratio of elasticstate's time to torchrun's."""

    def ratio(system: str, to: str) -> float | None:
        values, base = figures[system, "first step at"], figures[to, "first step at"]
        return median(values) / median(base) if values and base else None

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores; medians of {runs} runs.\n")
    row("system", "start → first step", "of torchrun's", "of python's", "CPU time", *PARTS)
    row(*["---"] * (5 + len(PARTS)))
    for system in systems:
        times = [f"{median(figures[system, name]):.2f} s" for name in ("first step at", "CPU", *PARTS)]
        row(system, times[0], shown(ratio(system, "torchrun")), shown(ratio(system, "python")), *times[1:])
    return ratio("elasticstate", "torchrun")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    args = parser.parse_args()

    figures: Figures = defaultdict(list)
    for run in range(args.runs):
        for system in args.systems:
            print(f"run {run + 1} of {args.runs}: {system}", file=sys.stderr)
            measure(system, figures)
    found = report(figures, args.systems, args.runs)
    if found is not None:
        print(f"\nGoal: at most {GOAL:g} of torchrun's; {'reached' if found <= GOAL else 'missed'}.")
    return int(found is not None and found > GOAL)


if __name__ == "__main__":
    sys.exit(main())
