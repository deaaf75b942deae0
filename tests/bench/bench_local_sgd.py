"""Bytes per inner step, time and loss of LocalSGD and DiLoCo, beside DDP. The systems run alternately.

Three workers of one thread train a GPT on real text (local_sgd_training.py), with outer steps each 20 inner steps. Each
system runs undisturbed with three seeds. Then a run with the first seed gets a SIGKILL of a worker, which joins again;
elasticstate's also a leave and another join.

- DDP: elasticrun, DistributedDataParallel, a commit each 20 steps.
- LocalSGD, DiLoCo, DiLoCo in four fragments: elasticstate.local_sgd.
- torchft's LocalSGD and DiLoCo: a replica group per worker, Gloo, a lighthouse. Needs ``--torchft PYTHON``, an
  interpreter that has torchft and the same torch.

The bytes are those that the kernel counts at the TCP connections of a worker. Prints markdown, and exits with 1 if a
method of elasticstate moves more than 1/20 of DDP's bytes or a disturbed run ends with a
loss that is above the largest of the undisturbed ones by more than their spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from bench_recovery import HERE, elasticrun, free_port, row, started
from local_sgd_training import EVERY

WORKERS = 3
SEEDS = (1, 2, 3)
FRAGMENTS = 4
METHODS = {
    "DDP": ["--method", "ddp"],
    "LocalSGD": ["--method", "local-sgd"],
    "DiLoCo": ["--method", "diloco"],
    "DiLoCo, 4 fragments": ["--method", "diloco", "--fragments", FRAGMENTS],
}
TORCHFT_METHODS = {"torchft LocalSGD": "local-sgd", "torchft DiLoCo": "diloco"}
LIGHTHOUSE = ["--min_replicas", 1, "--quorum_tick_ms", 100, "--join_timeout_ms", 10000]  # those of torchft's README
PACE_S = 0.06  # of the steps of a disturbed run, so that newcomers boot in time
WAIT_S = 120.0

Result = dict[str, Any]


def wait_for(folder: Path, worker: int, step: int, job: subprocess.Popen[bytes], besides: int = 0) -> int:
    """Wait until a worker has made this step. Return its process, which is not ``besides``."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and job.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            found, pid = map(int, (folder / f"at-{worker}").read_text().split())
            if found >= step and pid != besides:
                return pid
        time.sleep(0.005)
    raise RuntimeError(f"worker {worker} has not made step {step}")


def results(folder: Path) -> list[Result]:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*"))]
    if len(found) != WORKERS:
        raise RuntimeError(f"{len(found)} of {WORKERS} workers have ended")
    return found


def run_elastic(method: str, folder: Path, seed: int, steps: int, disturbed: bool) -> list[Result]:
    hosts, discovery, events = folder / "hosts", folder / "discover.sh", folder / "events"
    hosts.write_text(f"localhost:{WORKERS}\n")
    discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discovery.chmod(0o755)
    options = ["-np", WORKERS, "--min-np", 1, "--host-discovery-script", discovery, "--discovery-interval", 0.1]
    options += ["--min-interrupt-distance", 0.2, "--events-file", events]
    command = [*elasticrun(*options)[:-1], HERE / "local_sgd_worker.py", "--folder", folder, "--steps", steps]
    command += ["--seed", seed, "--pace", PACE_S * disturbed]
    with started([*command, *METHODS[method]], folder) as job:
        if disturbed:
            victim = wait_for(folder, 1, steps // 5, job)
            os.kill(victim, signal.SIGKILL)
            wait_for(folder, 1, 0, job, besides=victim)
            leaver = wait_for(folder, 2, steps // 2, job)
            hosts.write_text(f"localhost:{WORKERS - 1}\n")
            wait_for_end_of(leaver)
            hosts.write_text(f"localhost:{WORKERS}\n")
            wait_for(folder, 2, 0, job, besides=leaver)
    if disturbed:
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        sizes = [line["size"] for line in lines if line["event"] == "world_formed"]
        kills = [line for line in lines if line["event"] == "worker_exited" and line.get("signal") == signal.SIGKILL]
        if len(kills) != 1 or WORKERS - 1 not in sizes or sizes[-1] != WORKERS:
            raise RuntimeError(f"{len(kills)} kills, and worlds of {sizes} workers")
    return results(folder)


def wait_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} has not left")
        time.sleep(0.01)


def run_torchft(python: Path, method: str, folder: Path, seed: int, steps: int, disturbed: bool) -> list[Result]:
    address = f"127.0.0.1:{free_port()}"
    lighthouse = [python.with_name("torchft_lighthouse"), *LIGHTHOUSE, "--bind", address]
    script = [python, HERE / "local_sgd_torchft_worker.py", "--folder", folder, "--steps", steps, "--seed", seed]
    script += ["--pace", PACE_S * disturbed]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(lighthouse, folder, -signal.SIGTERM))
        stack.callback(server.terminate)  # after all replicas have ended

        def start(replica: int, status: int = 0) -> subprocess.Popen[bytes]:
            command = [*script, "--method", TORCHFT_METHODS[method], "--replica", replica]
            return stack.enter_context(started(command, folder, status, TORCHFT_LIGHTHOUSE=f"http://{address}"))

        for replica in range(WORKERS):
            job = start(replica, -signal.SIGKILL if disturbed and replica == WORKERS - 1 else 0)
        if disturbed:
            wait_for(folder, WORKERS - 1, steps // 5, job)
            job.kill()
            start(WORKERS - 1)
    return results(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="inner steps of each worker")
    parser.add_argument("--torchft", type=Path, help="interpreter that has torchft")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", help="systems besides DDP; default: all")
    args = parser.parse_args()
    systems: dict[str, Callable[..., list[Result]]] = dict.fromkeys(METHODS, run_elastic)
    if args.torchft is not None:
        systems |= dict.fromkeys(TORCHFT_METHODS, lambda *more: run_torchft(args.torchft, *more))
    systems = {name: run for name, run in systems.items() if name == "DDP" or name in (args.only or systems)}
    found: dict[tuple[str, bool], list[Result]] = {}
    for seed, disturbed in [*((seed, False) for seed in SEEDS), (SEEDS[0], True)]:
        for system, run in systems.items():
            print(f"{system}, seed {seed}{', disturbed' * disturbed}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir="/dev/shm") as folder:
                workers = run(system, Path(folder), seed, args.steps, disturbed)
            figures = {name: mean(each[name] for each in workers) for name in workers[0] if name != "worker"}
            found.setdefault((system, disturbed), []).append(figures)
            print(f"  {figures}", file=sys.stderr)
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores, {args.steps} steps.\n")
    row("system", "bytes per inner step", "of DDP's", "inner step", "losses of three runs", "loss of the disturbed run")
    row(*["---"] * 6)
    of_ddp = median(each["bytes"] for each in found["DDP", False])
    missed = []
    for system in systems:
        runs, (struck,) = found[system, False], found[system, True]
        moved, losses = median(each["bytes"] for each in runs), sorted(each["loss"] for each in runs)
        time_ms = median(each["ms"] for each in runs)
        shown = ", ".join(f"{loss:.3f}" for loss in losses)
        row(system, f"{moved:,.0f}", f"{moved / of_ddp:.5f}", f"{time_ms:.1f} ms", shown, f"{struck['loss']:.3f}")
        is_ours = system in METHODS and system != "DDP"
        if is_ours and (moved > of_ddp / EVERY or struck["loss"] > losses[-1] + (losses[-1] - losses[0])):
            missed.append(system)
    if missed:
        print(f"\nGoal missed: {', '.join(missed)}.")
        sys.exit(1)


if __name__ == "__main__":
    main()
