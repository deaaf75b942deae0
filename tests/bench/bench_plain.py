"""Time from a kill to the next step of a script for torchrun: under torchrun and under elasticrun, alternately.

Both run the same file (torchrun_worker.py), which imports nothing of elasticstate: two or more workers with one thread
each train a perceptron of 10.03 M parameters, and rank 0 writes a checkpoint to memory at every step. After step 30 the
bench kills one worker, and all workers restart. Prints markdown. The goal: at most a quarter of torchrun's time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench_recovery import CHANGE_AT, HERE, STEPS_AFTER, Figures, free_port, kill, note_recovery, started

GOAL = 0.25  # of torchrun's time


def commands(size: int, folder: Path) -> dict[str, list[object]]:
    """Return the command of each system."""
    script = [HERE / "torchrun_worker.py", "--folder", folder, "--checkpoint", folder / "checkpoint"]
    script += ["--steps", CHANGE_AT + STEPS_AFTER]
    options = ["--nproc-per-node", size, "--max-restarts", 2, "--rdzv-backend", "c10d"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", *options, *endpoint, *script],
        "elasticrun": [
            sys.executable,
            "-m",
            "elasticstate",
            "-np",
            size,
            "--max-restarts",
            2,
            "--",
            sys.executable,
            *script,
        ],
    }


def measure(system: str, size: int, phase: float, figures: Figures) -> None:
    """Run one job, and record the time from the kill to the next step of its last worker."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        # As shipped, torchrun's restarts with Gloo read the addresses of the last attempt (torch 2.13).
        command = commands(size, folder)[system]
        with started(command, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as job:
            killed_ns = kill(folder, job, phase)
        note_recovery(system, folder, killed_ns, size, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    figures: Figures = defaultdict(list)
    for number in range(args.rounds):
        for system in ("torchrun", "elasticrun"):
            measure(system, args.workers, (number + 0.5) / args.rounds, figures)
    middle = {system: median(figures[system, "recovery"]) for system in ("torchrun", "elasticrun")}
    print(
        f"A plain script, {args.workers} workers: SIGKILL of one to the next step of all, medians of {args.rounds}.\n"
    )
    print("| system | kill to next step | all runs |\n|---|---|---|")
    for system, value in middle.items():
        runs = ", ".join(f"{run:.0f}" for run in sorted(figures[system, "recovery"]))
        print(f"| {system} | {value:.0f} ms | {runs} |")
    share = middle["elasticrun"] / middle["torchrun"]
    print(f"\nelasticrun needs {share:.2f} of torchrun's time (goal: at most {GOAL}).")


if __name__ == "__main__":
    main()
