"""Time from a death until all four workers train again. The systems run alternately.

The training is that of bench_recovery.py: four workers with one thread each, 10.03 M parameters, a commit or checkpoint
at every step. After step 30 the bench kills one worker, or all of them.

- torchrun: one agent, all workers restarted, checkpoint in memory.
- elasticstate: workers fork from the template process.
- elasticstate, new processes: the same with --no-template.

The time ends when the last of four workers has completed a step in a world of four. Prints markdown. Exits with 1 if a
goal is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from bench_recovery import CHANGE_AT, HERE, VICTIM, Figures, elasticrun, read_steps, row, started, wait_for_step
from workload import Step

WORKERS = 4
STEPS_AFTER = 60  # more than the slowest system needs until all workers train again
GOAL_ONE = 0.15  # of torchrun's time
GOAL_ALL = 0.2  # of the time with new processes


def torchrun(folder: Path) -> list[object]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", WORKERS]
    script = [HERE / "torchrun_worker.py", "--folder", folder, "--checkpoint", folder / "checkpoint"]
    return [*launcher, "--max-restarts", 3, *script, "--steps", CHANGE_AT + STEPS_AFTER]


def elastic(folder: Path) -> list[object]:
    return [*elasticrun("-np", WORKERS, "--min-np", 2), "--folder", folder, "--steps-after", STEPS_AFTER]


def elastic_new(folder: Path) -> list[object]:
    options = ("-np", WORKERS, "--min-np", 2, "--no-template")
    return [*elasticrun(*options), "--folder", folder, "--steps-after", STEPS_AFTER]


SYSTEMS = {"torchrun": torchrun, "elasticstate": elastic, "elasticstate, new processes": elastic_new}


def pids_of_world(folder: Path, generation: int) -> list[int]:
    return [steps[-1].pid for steps in read_steps(folder).values() if steps[-1].generation == generation]


def all_train_ns(processes: Sequence[Sequence[Step]], killed_ns: int) -> int:
    """Return when the last of four workers completed its first step in the first world of four after the kill."""
    firsts: dict[int, list[int]] = defaultdict(list)  # of each generation
    for steps in processes:
        for generation in {step.generation for step in steps if step.generation > 1}:
            firsts[generation].append(min(step.end_ns for step in steps if step.generation == generation))
    whole = [max(ends) for _, ends in sorted(firsts.items()) if len(ends) == WORKERS]
    if not whole:
        raise RuntimeError(f"no world of {WORKERS} after the kill: {dict(firsts)}")
    assert whole[0] > killed_ns
    return whole[0]


def death(system: str, folder: Path, count: int, phase: float) -> float:
    """Return the seconds from the kill of ``count`` workers until all train. ``phase``: of a step, before the kill."""
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else restarted workers read the addresses of the dead
    with started(SYSTEMS[system](folder), folder, **variables) as job:
        steps = wait_for_step(folder, CHANGE_AT, VICTIM, job)
        time.sleep(phase * (steps[-1].end_ns - steps[-11].end_ns) / 10e9)
        victims = [steps[-1].pid] if count == 1 else pids_of_world(folder, 1)
        assert len(victims) == count, victims
        killed_ns = time.monotonic_ns()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
    return (all_train_ns(list(read_steps(folder).values()), killed_ns) - killed_ns) / 1e9


def report(figures: Figures, systems: list[str], runs: int) -> bool:
    """Print the medians. Return False if a goal is missed."""

    def ratio(figure: str, to: str) -> float | None:
        values, base = figures["elasticstate", figure], figures[to, figure]
        return median(values) / median(base) if values and base else None

    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores; medians of {runs} runs.\n")
    row("system", "one killed → all four train", "all killed → all four train")
    row("---", "---", "---")
    for system in systems:
        row(system, *(f"{median(figures[system, figure]):.2f} s" for figure in ("one", "all")))
    goals = [("one", "torchrun", GOAL_ONE), ("all", "elasticstate, new processes", GOAL_ALL)]
    found = [(ratio(figure, to), figure, to, goal) for figure, to, goal in goals]
    for value, figure, to, goal in found:
        if value is not None:
            print(f"\n{figure} killed: {value:.3f} of {to} (goal: at most {goal:g}).")
    return all(value is None or value <= goal for value, _, _, goal in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    args = parser.parse_args()
    figures: Figures = defaultdict(list)
    for run in range(args.runs):
        for system in args.systems:
            for figure, count in (("one", 1), ("all", WORKERS)):
                print(f"run {run + 1} of {args.runs}: {system}, {figure} killed", file=sys.stderr)
                with tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir="/dev/shm") as folder:
                    figures[system, figure].append(death(system, Path(folder), count, run / args.runs))
    if not report(figures, args.systems, args.runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
