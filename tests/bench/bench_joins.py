"""Largest gap between two steps of the old workers while a fourth worker joins three. The systems run alternately.

With ``--returns`` that is a worker that was killed and is started again, and no worker warms up.

The training is that of bench_recovery.py: 80 MB of state, a commit at every step.

- floor: bare Gloo without a framework (floor_worker.py).
- elasticstate: elasticrun (elastic_worker.py), with ``warmup`` unless ``--cold`` is given.
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
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_recovery import (
    CHANGE_AT,
    HERE,
    STEPS_AFTER,
    Figures,
    elastic_join,
    elasticrun,
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


def elastic_return(folder: Path, phase: float, figures: Figures) -> None:
    script = ["--folder", folder, "--steps-after", STEPS_AFTER, "--last", 3]
    with started([*elasticrun("-np", OLD + 1, "--min-np", OLD), *script], folder) as job:
        os.kill(wait_for_step(folder, CHANGE_AT, OLD, job)[-1].pid, signal.SIGKILL)
    figures["elasticstate", "pause"].append(gap_at(folder, 3))


def torchft_return(python: Path, folder: Path, phase: float, figures: Figures) -> None:
    with torchft(python, folder, False, "--loses") as (start, server):
        for replica in range(OLD):
            start(replica)
        victim = start(OLD, status=-signal.SIGKILL)
        wait_for_step(folder, CHANGE_AT, OLD, server)
        victim.kill()
        victim.wait()
        wait_for_generation(folder, 2)  # the others train on: their pause after the kill is not that of the return
        start(OLD, "--returns")
    figures["torchft", "pause"].append(gap_at(folder, 3))


def wait_for_generation(folder: Path, generation: int) -> None:
    deadline = time.monotonic() + 20
    while not any(step.generation == generation for steps in read_steps(folder).values() for step in steps[-4:-3]):
        assert time.monotonic() < deadline, f"no worker has made some steps of generation {generation}"
        time.sleep(0.01)


def gap_at(folder: Path, generation: int) -> float:
    """Return the longest time in ms between two steps of an old worker, near its first one in this generation."""
    gaps = []
    for steps in read_steps(folder).values():
        first = next(i for i, step in enumerate(steps) if step.generation == generation or step is steps[-1])
        if steps[0].generation == 1 and steps[first].generation == generation:
            around = steps[max(0, first - 3) : first + 4]
            gaps.append(max(b.end_ns - a.end_ns for a, b in pairwise(around)) / 1e6)
    assert len(gaps) >= OLD, "all old workers must go on"
    return max(gaps)


@contextlib.contextmanager
def torchft(python: Path, folder: Path, warms_up: bool, *options: str) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Run a lighthouse. The first value starts a replica, the second one is the lighthouse's process."""
    address = f"127.0.0.1:{free_port()}"
    lighthouse = [python.with_name("torchft_lighthouse"), *LIGHTHOUSE, "--bind", address]
    script = [python, HERE / "torchft_worker.py", "--folder", folder, "--size", OLD + 1, "--steps-after", STEPS_AFTER]
    script += [*options, *(["--warm-up"] if warms_up else [])]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(lighthouse, folder, -signal.SIGTERM))
        stack.callback(server.terminate)  # after all replicas have ended

        def start(replica: int, *more: str, status: int = 0) -> subprocess.Popen[bytes]:
            variables = {"TORCHFT_LIGHTHOUSE": f"http://{address}"}
            command = [*script, "--replica", replica, *more]
            return stack.enter_context(started(command, folder, status, **variables))

        yield start, server


def torchft_join(python: Path, warms_up: bool, folder: Path, phase: float, figures: Figures) -> None:
    with torchft(python, folder, warms_up) as (start, server):
        for replica in range(OLD):
            start(replica)
        wait_for_step(folder, CHANGE_AT, 0, server)
        start(OLD)
    figures["torchft", "pause"].append(gap_at(folder, 2))


def note_step(system: str, folder: Path, last: int, figures: Figures) -> None:
    """Record the median step in the first generation, and in the last one."""
    for generation, name in ((1, "step before"), (last, "step after")):
        steps = next(steps for steps in read_steps(folder).values() if steps[0].rank == 0 and steps[0].generation == 1)
        ends = [step.end_ns for step in steps if step.generation == generation][2:]
        figures[system, name].append(median(b - a for a, b in pairwise(ends)) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--torchft", type=Path, help="interpreter that has torchft")
    parser.add_argument("--returns", action="store_true", help="the fourth worker was killed, and returns")
    parser.add_argument("--cold", action="store_true", help="newcomers have computed nothing, as without `warmup`")
    args = parser.parse_args()
    systems: dict[str, Callable[[Path, float, Figures], None]] = {
        "floor": floor_join,
        "elasticstate": functools.partial(elastic_join, warms_up=not args.cold),
    }
    if args.torchft is not None:
        systems["torchft"] = functools.partial(torchft_join, args.torchft, not args.cold)
    if args.returns:
        systems = {"elasticstate": elastic_return}
        if args.torchft is not None:
            systems["torchft"] = functools.partial(torchft_return, args.torchft)
    figures: Figures = defaultdict(list)
    for run in range(args.runs):
        for system, join in systems.items():
            print(f"run {run + 1} of {args.runs}: {system}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir="/dev/shm") as folder:
                try:
                    join(Path(folder), run / args.runs, figures)
                except (AssertionError, RuntimeError) as error:
                    if system != "torchft":
                        raise
                    print(f"torchft did not survive the kill: {error}", file=sys.stderr)
                else:
                    note_step(system, Path(folder), 3 if args.returns else 2, figures)
    cores = len(os.sched_getaffinity(0))
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores; medians of {args.runs} runs.\n"
    )
    row("system", "largest gap", "step before", "step after")
    row(*["---"] * 4)
    for system in systems:
        if not figures[system, "pause"]:
            row(system, "no run succeeded", "", "")
            continue
        row(system, *(f"{median(figures[system, name]):.0f} ms" for name in ("pause", "step before", "step after")))
    if figures["torchft", "pause"]:
        count = len(figures["torchft", "pause"])
        ratio = median(figures["elasticstate", "pause"]) / median(figures["torchft", "pause"])
        print(f"\nGap: {ratio:.2f} of torchft's (goal: at most {GOAL:g}); {count} runs of torchft succeeded.")
        if ratio > GOAL:
            sys.exit(1)


if __name__ == "__main__":
    main()
