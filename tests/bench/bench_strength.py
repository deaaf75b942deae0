"""Time from a death until all four workers train again. The systems run alternately.

The training is that of bench_recovery.py: four workers with one thread each, 10.03 M parameters, a commit or checkpoint
at every step. After step 30 the bench kills one worker, or all of them.

- torchrun: one agent, all workers restarted, checkpoint in memory.
- elasticstate: workers fork from the template process.
- elasticstate, new processes: the same with --preload off.
- elasticstate, a spare: with --spares 1, on a host of five slots, and with a warmup. One worker is killed.

The time ends when the last of four workers has completed a step in a world of four. The goal of the spare adds the time
of the sync, from the events, to the time without a spare until the survivors complete a step. Prints markdown. Exits
with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from bench_recovery import CHANGE_AT, HERE, VICTIM, Figures, elasticrun, read_steps, row, started, wait_for_step
from workload import Step

WORKERS = 4
STEPS_AFTER = 60  # more than the slowest system needs until all workers train again
GOAL_ONE = 0.15  # of torchrun's time
GOAL_ALL = 0.2  # of the time with new processes
GOAL_SPARE = 1.3  # of the survivors' time without a spare, plus the sync
SPARE = "elasticstate, a spare"


def torchrun(folder: Path) -> list[object]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", WORKERS]
    script = [HERE / "torchrun_worker.py", "--folder", folder, "--checkpoint", folder / "checkpoint"]
    return [*launcher, "--max-restarts", 3, *script, "--steps", CHANGE_AT + STEPS_AFTER]


def elastic(folder: Path, *options: object) -> list[object]:
    common = ("-np", WORKERS, "--min-np", 2, "--max-np", WORKERS, "--events-file", folder / "events")
    return [*elasticrun(*common, *options), "--folder", folder, "--steps-after", STEPS_AFTER]


def elastic_new(folder: Path) -> list[object]:
    return elastic(folder, "--preload=off")


def elastic_spare(folder: Path) -> list[object]:
    return [*elastic(folder, "--spares", 1, "-H", f"localhost:{WORKERS + 1}"), "--warm-up"]


SYSTEMS: dict[str, Callable[[Path], list[object]]] = {
    "torchrun": torchrun,
    "elasticstate": elastic,
    "elasticstate, new processes": elastic_new,
    SPARE: elastic_spare,
}


def pids_of_world(folder: Path, generation: int) -> list[int]:
    return [steps[-1].pid for steps in read_steps(folder).values() if steps[-1].generation == generation]


def next_step_ns(processes: Sequence[Sequence[Step]]) -> int:
    """Return when the last worker of the next world had completed a step, as bench_recovery.py does."""
    ends = [[step.end_ns for step in steps if step.generation == 2] for steps in processes]
    return max(min(found) for found in ends if found)


def sync_s(folder: Path) -> float:
    """Return the seconds of the sync that gave a newcomer the state."""
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    return float([event["seconds"] for event in events if event["event"] == "sync"][-1])


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


def death(system: str, folder: Path, count: int, phase: float) -> dict[str, float]:
    """Kill ``count`` workers. Return seconds. ``phase``: of a step, before the kill."""
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else restarted workers read the addresses of the dead
    with started(SYSTEMS[system](folder), folder, **variables) as job:
        steps = wait_for_step(folder, CHANGE_AT, VICTIM, job)
        time.sleep(phase * (steps[-1].end_ns - steps[-11].end_ns) / 10e9)
        victims = [steps[-1].pid] if count == 1 else pids_of_world(folder, 1)
        assert len(victims) == count, victims
        killed_ns = time.monotonic_ns()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
    processes = list(read_steps(folder).values())
    found = {"next": next_step_ns(processes), "all train": all_train_ns(processes, killed_ns)}
    if system == SPARE:
        assert all(step.generation <= 2 for steps in processes for step in steps), "the spare was not in the next world"
    return {figure: (end_ns - killed_ns) / 1e9 for figure, end_ns in found.items()}


def measure(system: str, count: int, phase: float, figures: Figures) -> None:
    killed = "one" if count == 1 else "all"
    with tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        for figure, seconds in death(system, folder, count, phase).items():
            figures[system, f"{killed} killed → {figure}"].append(seconds)
        if system == SPARE:
            figures[system, "sync"].append(sync_s(folder))


def report(figures: Figures, systems: list[str], runs: int) -> bool:
    """Print the medians. Return False if a goal is missed."""

    def found(system: str, figure: str) -> float | None:
        values = figures[system, figure]
        return median(values) if values else None

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores; medians of {runs} runs.\n")
    columns = ("one killed → next", "one killed → all train", "all killed → all train", "sync")
    row("system", *columns)
    row(*["---"] * (1 + len(columns)))
    for system in systems:
        row(system, *(shown(found(system, figure)) for figure in columns))
    goals = [
        ("elasticstate", "one killed → all train", "torchrun", "one killed → all train", GOAL_ONE),
        ("elasticstate", "all killed → all train", "elasticstate, new processes", "all killed → all train", GOAL_ALL),
        (SPARE, "one killed → all train", "elasticstate", "one killed → next", GOAL_SPARE),
    ]
    reached = True
    for system, figure, other, to, goal in goals:
        value, base = found(system, figure), found(other, to)
        if value is None or base is None:
            continue
        value -= (found(SPARE, "sync") or 0.0) if system == SPARE else 0.0
        without = " without its sync" if system == SPARE else ""
        print(f"\n{system}, {figure}{without}: {value / base:.3f} of {other}, {to} (goal: at most {goal:g}).")
        reached = reached and value <= goal * base
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    args = parser.parse_args()
    figures: Figures = defaultdict(list)
    for run in range(args.runs):
        for system in args.systems:
            for count in (1,) if system == SPARE else (1, WORKERS):
                print(f"run {run + 1} of {args.runs}: {system}, {count} killed", file=sys.stderr)
                measure(system, count, run / args.runs, figures)
    if not report(figures, args.systems, args.runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
