"""Time without training of the survivors, after a death and when a worker joins. The systems run alternately.

Four workers with one thread each train a perceptron of 10.03 M parameters by SGD with momentum, batch 8, with a commit
or checkpoint at every step. After step 30 the bench kills a worker that is not rank 0; or a fourth worker joins three.

- floor: bare Gloo without a framework; all processes know the coming change in advance (floor_worker.py).
- torchrun: one agent, all workers restarted, checkpoint in memory (torchrun_worker.py).
- elasticstate: elasticrun, a commit at every step (elastic_worker.py).
- elasticstate, MPI: the same with --backend mpi.

Each run kills at a different point of the step; the points are the same for all systems. Prints markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from workload import Step

HERE = Path(__file__).parent
CHANGE_AT = 30  # number of the step
STEPS_AFTER = 8
VICTIM = 2  # rank
MPI = "elasticstate, MPI"
JOB_TIMEOUT_S = 120.0

Figures = defaultdict[tuple[str, str], list[float]]  # (system, figure) -> one value per run


def read_steps(folder: Path) -> dict[int, list[Step]]:
    """Return the steps that each process has completed, by process id."""
    return {
        int(path.stem): [Step(*map(int, line.split())) for line in path.read_text().splitlines()]
        for path in folder.glob("*.steps")
    }


def wait_for_step(folder: Path, step: int, rank: int, job: subprocess.Popen[bytes]) -> list[Step]:
    """Wait until the worker of a rank has completed a step. Return all steps that it has completed."""
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while time.monotonic() < deadline and job.poll() is None:
        for steps in read_steps(folder).values():
            if steps and steps[-1].rank == rank and steps[-1].step >= step:
                return steps
        time.sleep(0.002)
    state = "runs" if job.poll() is None else f"has ended with status {job.returncode}"
    raise RuntimeError(f"rank {rank} has not completed step {step}; the job {state}: {job.args!r}")


@contextlib.contextmanager
def started(
    command: Sequence[object], folder: Path, status: int = 0, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job with its output in the folder. The job must end with this status."""
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    with output.open("w") as file:
        job = subprocess.Popen(
            list(map(str, command)),
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield job
        if job.wait(JOB_TIMEOUT_S) != status:
            raise RuntimeError(f"status {job.returncode}: {job.args!r}")
    except BaseException:
        print(output.read_text()[-5000:], file=sys.stderr)
        raise
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(JOB_TIMEOUT_S)


def kill(folder: Path, job: subprocess.Popen[bytes], phase: float) -> int:
    """Kill the victim with SIGKILL, ``phase`` of a step after step CHANGE_AT. Return the time (CLOCK_MONOTONIC, ns)."""
    steps = wait_for_step(folder, CHANGE_AT, VICTIM, job)
    step_ns = (steps[-1].end_ns - steps[-11].end_ns) / 10
    time.sleep(phase * step_ns / 1e9)
    killed_ns = time.monotonic_ns()
    os.kill(steps[-1].pid, signal.SIGKILL)
    return killed_ns


def note_steady_state(system: str, folder: Path, figures: Figures) -> None:
    """Record step time and checkpoint cost of rank 0 before the change, without the first five steps."""
    steps = next(steps for steps in read_steps(folder).values() if steps[0].rank == 0 and steps[0].generation == 1)
    before_change = [step for step in steps if 5 <= step.step < CHANGE_AT and step.generation == 1]
    figures[system, "step"].append(median(b.end_ns - a.end_ns for a, b in pairwise(before_change)) / 1e6)
    figures[system, "checkpoint"].append(median(step.checkpoint_ns for step in before_change) / 1e6)


def note_recovery(system: str, folder: Path, killed_ns: int, size: int, figures: Figures) -> None:
    """Record the time from the kill to the end of the first step of generation 2 on the last of its workers."""
    ends = [[step.end_ns for step in steps if step.generation == 2] for steps in read_steps(folder).values()]
    first = [min(found) for found in ends if found]  # a restarted worker may join in generation 3
    if len(first) < size:
        raise RuntimeError(f"{system}: {len(first)} of {size} workers went on after the kill")
    figures[system, "recovery"].append((sorted(first)[size - 1] - killed_ns) / 1e6)


def note_pause(system: str, folder: Path, figures: Figures) -> None:
    """Record the longest time between two steps of an old worker, from two steps before the change to two after it."""
    pauses = []
    for steps in read_steps(folder).values():
        old = [i for i, step in enumerate(steps) if step.generation == 1]
        if old and len(steps) > old[-1] + 3:
            around = steps[old[-1] - 2 : old[-1] + 4]
            pauses.append(max(b.end_ns - a.end_ns for a, b in pairwise(around)))
    if len(pauses) < 3:
        raise RuntimeError(f"{system}: {len(pauses)} of 3 workers went on after the change")
    figures[system, "pause"].append(max(pauses) / 1e6)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_floor(folder: Path, size: int, *change: object, during: Callable[[subprocess.Popen[bytes]], None]) -> None:
    """Run four processes with bare Gloo. They train from the start or join later."""
    common = ["--size", size, "--port", free_port(), "--folder", folder, "--steps-after", STEPS_AFTER, *change]
    with contextlib.ExitStack() as stack:
        jobs = []
        for rank in range(4):
            command = [sys.executable, HERE / "floor_worker.py", "--rank", rank, *common]
            status = -signal.SIGKILL if "--victim" in change and rank == VICTIM else 0
            jobs.append(stack.enter_context(started(command, folder, status)))
        during(jobs[0])


def floor_death(folder: Path, phase: float, figures: Figures) -> None:
    killed_ns = 0

    def during(job: subprocess.Popen[bytes]) -> None:
        nonlocal killed_ns
        killed_ns = kill(folder, job, phase)

    run_floor(folder, 4, "--victim", VICTIM, during=during)
    note_steady_state("floor", folder, figures)
    note_recovery("floor", folder, killed_ns, 3, figures)
    note_parts("floor", folder, killed_ns, [], figures)


def note_parts(system: str, folder: Path, killed_ns: int, before: list[tuple[str, int]], figures: Figures) -> None:
    """Record the parts of a recovery on rank 0. ``before``: parts that ended before the parts that rank 0 marked."""
    steps = next(steps for steps in read_steps(folder).values() if steps[0].rank == 0 and steps[0].generation == 1)
    marks = [line.rsplit(" ", 1) for line in (folder / f"{steps[0].pid}.marks").read_text().splitlines()]
    end_ns = next(step.end_ns for step in steps if step.generation == 2)  # later marks are those of the next join
    parts = [*before, *((part, int(at)) for part, at in marks if killed_ns < int(at) < end_ns), ("first step", end_ns)]
    last_ns = killed_ns
    for part, at_ns in parts:
        figures[system, part].append((at_ns - last_ns) / 1e6)
        last_ns = at_ns


def floor_join(folder: Path, phase: float, figures: Figures) -> None:
    run_floor(folder, 3, "--join-at", CHANGE_AT, during=lambda job: None)
    note_pause("floor", folder, figures)


def torchrun_death(folder: Path, phase: float, figures: Figures) -> None:
    script = [HERE / "torchrun_worker.py", "--folder", folder, "--checkpoint", folder / "checkpoint"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        4,
        "--max-restarts",
        3,
    ]
    command = [*torchrun, *script, "--steps", CHANGE_AT + STEPS_AFTER]
    # Without this variable, a restart with Gloo reads the addresses of the last attempt, and hangs.
    with started(command, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as job:
        killed_ns = kill(folder, job, phase)
    note_steady_state("torchrun", folder, figures)
    note_recovery("torchrun", folder, killed_ns, 4, figures)


def elasticrun(*options: object) -> list[object]:
    return [Path(sys.executable).with_name("elasticrun"), *options, sys.executable, HERE / "elastic_worker.py"]


def elastic_death(
    folder: Path, phase: float, figures: Figures, system: str = "elasticstate", backend: str = "gloo"
) -> None:
    options = ["-np", "4", "--min-np", "2", "--backend", backend, "--events-file", folder / "events"]
    command = [*elasticrun(*options), "--folder", folder, "--steps-after", STEPS_AFTER]
    unix_ns = time.time_ns() - time.monotonic_ns()  # events carry unix time
    with started(command, folder) as job:
        killed_ns = kill(folder, job, phase)
    note_steady_state(system, folder, figures)
    note_recovery(system, folder, killed_ns, 3, figures)
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    at_ns = {event["event"]: int(event["time"] * 1e9) - unix_ns for event in reversed(events)}  # the first of each
    # The first detection: by the agent, which sees the exit, or by a survivor, whose socket is closed.
    decided = [("detect", min(at_ns["worker_exited"], at_ns["end"])), ("verdict", at_ns["end"])]
    note_parts(system, folder, killed_ns, decided, figures)
    figures[system, "tick"].append(float((folder / "tick_ns").read_text()) / 1e3)


def elastic_join(
    folder: Path,
    phase: float,
    figures: Figures,
    system: str = "elasticstate",
    backend: str = "gloo",
    warms_up: bool = True,
) -> None:
    hosts, script = folder / "hosts", folder / "discover.sh"
    hosts.write_text("localhost:3\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    options = ["-np", "3", "--max-np", "4", "--backend", backend, "--host-discovery-script", script]
    script = ["--folder", folder, "--steps-after", STEPS_AFTER, *(["--warm-up"] if warms_up else [])]
    with started([*elasticrun(*options), *script], folder) as job:
        wait_for_step(folder, CHANGE_AT, 0, job)
        hosts.write_text("localhost:4\n")
    note_pause(system, folder, figures)


def mpi_death(folder: Path, phase: float, figures: Figures) -> None:
    elastic_death(folder, phase, figures, MPI, "mpi")


def mpi_join(folder: Path, phase: float, figures: Figures) -> None:
    elastic_join(folder, phase, figures, MPI, "mpi")


BENCHES = {
    "floor": [floor_death, floor_join],
    "torchrun": [torchrun_death],
    "elasticstate": [elastic_death, elastic_join],
    MPI: [mpi_death, mpi_join],
}


PARTS = {
    "floor": ["detect", "destroy", "init", "DDP", "first step"],
    "elasticstate": ["detect", "verdict", "sever", "restore", "regroup", "first step"],
    MPI: ["detect", "verdict", "sever", "restore", "regroup", "first step"],
}


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def report(figures: Figures, systems: list[str], runs: int) -> None:
    """Print the medians, and their ratios to those of the floor."""

    def cell(system: str, figure: str, unit: str = "ms") -> str:
        values = figures[system, figure]
        return f"{median(values):.{0 if median(values) >= 10 else 1}f} {unit}" if values else "-"

    def ratio(system: str, figure: str, to: str) -> str:
        values, base = figures[system, figure], figures[to, figure]
        return f"{median(values) / median(base):.2f}" if values and base else "-"

    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores; medians of {runs} runs.\n")
    row(
        "system",
        "kill → next step",
        "of torchrun's",
        "of the floor's",
        "pause at a join",
        "of the floor's",
        "step",
        "commit or checkpoint",
    )
    row(*["---"] * 8)
    for name in systems:
        recovery = [cell(name, "recovery"), ratio(name, "recovery", "torchrun"), ratio(name, "recovery", "floor")]
        pause = [cell(name, "pause"), ratio(name, "pause", "floor")]
        row(name, *recovery, *pause, cell(name, "step"), cell(name, "checkpoint"))
    for name, parts in PARTS.items():
        if figures[name, "detect"]:
            print(f"\n{name}'s recovery on rank 0: " + ", ".join(f"{part} {cell(name, part)}" for part in parts) + ".")
    if figures[MPI, "recovery"] and figures["elasticstate", "recovery"]:
        print(f"\nMPI's recovery: {ratio(MPI, 'recovery', 'elasticstate')} of Gloo's (goal: at most 2).")
    if figures["elasticstate", "tick"]:
        print(f"\n`check_host_updates()`: {cell('elasticstate', 'tick', 'µs')}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=BENCHES, default=list(BENCHES))
    args = parser.parse_args()

    figures: Figures = defaultdict(list)
    for run in range(args.runs):
        for system in args.systems:
            for bench in BENCHES[system]:
                print(f"run {run + 1} of {args.runs}: {bench.__name__}", file=sys.stderr)
                with tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir="/dev/shm") as folder:
                    bench(Path(folder), run / args.runs, figures)
    report(figures, args.systems, args.runs)


if __name__ == "__main__":
    main()
