"""Sharded state (FSDP2): commits, replication, training beside replication, and a lost host, each next to a peer.

- commit: ``commit()`` of a job of two workers, until it is sealed, checksum included. Both ranks begin together. The
  peer is a plain copy of as many bytes by as many threads in the same processes (for a device: torch's own copy into
  pinned memory).
- replication: of a copy in another process. The peer is a raw TCP stream between these processes (bench_copies.py).
- step: a training of two workers, one on each of two local hosts, with one thread each, that computes all the time and
  commits every tenth step. The peer is the same job with ``--replicas 0``. Both jobs stay up, and train by turns. A
  turn ends five steps after its last commit.
- lost host: SIGKILL of a worker and its agent on one of two local hosts, until the other has completed a step.
  The peer is torchrun with one agent per host and torch.distributed.checkpoint on a disk: same model, same step,
  checkpoints as often as commits. (The checkpoint is still in the page cache when it is loaded.) torchrun waits 30 s
  for more hosts, and 15 s until it counts one as lost; with short waits 3 s and 3 s.

The systems run by turns in one run. Each lost host falls in a different part of a step, the same for both. Ratios are
medians over the rounds. Prints markdown. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import bench_copies
import psutil
import torch
from bench_recovery import free_port, read_steps, row, started, wait_for_step
from sharded_training import SIZES

import elasticstate as elastic

HERE = Path(__file__).parent
HOSTS = ("localhost", "127.0.0.2")
TIMEOUT_S = 120.0
BLOCK = 20  # steps of a turn
EVERY = 5  # steps between two commits or checkpoints, where a host is lost
LOST_AFTER, STEPS_AFTER = 7, 4  # steps
VICTIM = 1  # host
SHORT_WAITS = "last_call_timeout=3,keep_alive_interval=1"  # seconds; a host is lost after three intervals


class Figure(NamedTuple):
    """One row of the table."""

    what: str
    own: str
    peer: str
    ratios: list[float]
    goal: float
    is_least: bool  # else the goal is the most

    @property
    def is_met(self) -> bool:
        return median(self.ratios) >= self.goal if self.is_least else median(self.ratios) <= self.goal

    def print(self) -> None:
        spread = f"{median(self.ratios):.3f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        goal = f"{'≥' if self.is_least else '≤'} {self.goal:g}"
        row(self.what, self.own, self.peer, spread, goal, "met" if self.is_met else "MISSED")


def seconds(values: list[float]) -> str:
    return f"{median(values):.2f} s" if median(values) >= 1 else f"{median(values) * 1e3:.1f} ms"


def elasticrun(*options: object) -> list[object]:
    return [Path(sys.executable).with_name("elasticrun"), *options, sys.executable, HERE / "sharded_worker.py"]


class Job:
    """A job that carries out requests."""

    def __init__(self, size: str, hosts: str, *options: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="elasticstate-bench-")
        folder = Path(self._folder.name)
        address = str(folder / "requests")
        command = [*elasticrun("-np", 2, "-H", hosts, *options), "--size", size, "--requests", address]
        self._job = started(command, folder)
        with Listener(address, "AF_UNIX") as listener:
            self._process = self._job.__enter__()
            self._requests: Connection = listener.accept()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._requests.send(None)
        self._requests.close()
        self._job.__exit__(*error)
        self._folder.cleanup()

    def ask(self, request: object) -> tuple[float, float]:
        """Return the seconds that rank 0 took, and its CPU seconds."""
        self._requests.send(request)
        if not self._requests.poll(TIMEOUT_S):
            raise RuntimeError(f"no answer to {request!r}; status of the job: {self._process.poll()}")
        found: tuple[float, float] = self._requests.recv()
        return found


# ------------------------------------------------------------------------------------------------------------- parts


def commits(rounds: int) -> Figure:
    own, peer = [], []
    with Job("large", "localhost:2") as job:
        for number in range(rounds + 2):
            order = ("commit", "memcpy") if number % 2 else ("memcpy", "commit")
            found = {request: job.ask(request)[0] for request in order}
            if number >= 2:  # both buffers have been written
                own.append(found["commit"])
                peer.append(found["memcpy"])
    ratios = [theirs / ours for ours, theirs in zip(own, peer, strict=True)]
    return Figure("commit, throughput", seconds(own), f"memcpy, {seconds(peer)}", ratios, 0.85, True)


def replication(rounds: int) -> Figure:
    found, raws = bench_copies.measure(256, rounds)
    bench_copies.report(256, rounds, found, raws)
    print()
    ratios = [ratio for ratio, _ in found[bench_copies.REPLICATION]]
    speed = 0.25 / median(raws)
    return Figure(
        "replication, throughput",
        f"{speed * median(ratios):.2f} GB/s",
        f"raw TCP, {speed:.2f} GB/s",
        ratios,
        bench_copies.GOAL,
        True,
    )


def steps(rounds: int) -> Figure:
    own: list[tuple[float, float]] = []
    peer: list[tuple[float, float]] = []
    hosts = ",".join(f"{host}:1" for host in HOSTS)
    with Job("small", hosts, "--replicas", 1) as replicated, Job("small", hosts, "--replicas", 0) as plain:
        for number in range(rounds + 1):
            pairs = [(replicated, own), (plain, peer)]
            for job, times in pairs if number % 2 else reversed(pairs):
                found = job.ask(BLOCK)
                if number:
                    times.append((found[0] / BLOCK, found[1] / BLOCK))
    ratios = [ours / theirs for (ours, _), (theirs, _) in zip(own, peer, strict=True)]
    cells = [f"{seconds([t for t, _ in times])} ({seconds([c for _, c in times])} CPU)" for times in (own, peer)]
    return Figure("step beside replication", cells[0], f"without, {cells[1]}", ratios, 1.03, False)


def lost_host(rounds: int, disk: Path) -> list[Figure]:
    """Compare with torchrun, with short waits and as it comes."""
    systems = {
        "elasticstate": lambda folder, phase: elastic_loss(folder, phase),
        "torchrun, short waits": lambda folder, phase: torchrun_loss(folder, phase, disk, SHORT_WAITS),
        "torchrun": lambda folder, phase: torchrun_loss(folder, phase, disk),
    }
    found: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(rounds):
        for system, lose in systems.items():
            print(f"lost host, round {number + 1} of {rounds}: {system}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="elasticstate-bench-") as folder:
                found[system].append(lose(Path(folder), number / rounds))
    own, *peers = found.items()
    return [
        Figure(
            "host lost → next step",
            seconds(own[1]),
            f"{peer}, DCP, {seconds(times)}",
            [ours / theirs for ours, theirs in zip(own[1], times, strict=True)],
            0.1,
            False,
        )
        for peer, times in peers
    ]


def elastic_loss(folder: Path, phase: float) -> float:
    size = len(HOSTS)
    hosts = ",".join(f"{host}:1" for host in HOSTS)
    options = ["-np", size, "--min-np", size - 1, "-H", hosts, "--cooldown-range", 600, 600]
    script = ["--size", "large", "--folder", folder, "--every", EVERY, "--steps-after", STEPS_AFTER]
    with started([*elasticrun(*options), *script], folder) as job:
        wait_for_part_of_a_step(folder, phase, job)
        worker = next(steps[0] for steps in read_steps(folder).values() if steps[0].rank == VICTIM)
        agent = next(parent for parent in psutil.Process(worker.pid).parents() if parent.ppid() == job.pid)
        killed_ns = kill_host(agent, worker.pid)
    return next_step_s(folder, killed_ns)


def torchrun_loss(folder: Path, phase: float, disk: Path, waits: str = "") -> float:
    size, port = len(HOSTS), free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{size - 1}:{size}", "--nproc-per-node", 1]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--local-addr", "127.0.0.1"]
    script = ["--size", "large", "--folder", folder, "--every", EVERY, "--steps", LOST_AFTER + STEPS_AFTER]
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(tempfile.TemporaryDirectory(prefix="elasticstate-bench-", dir=disk))
        agents = []
        for host in range(size):
            options = ["--max-restarts", 3, "--rdzv-conf", f"is_host={int(not host)},{waits}".rstrip(",")]
            command = [*torchrun, *options, HERE / "dcp_worker.py", *script, "--checkpoints", checkpoints]
            status = -signal.SIGKILL if host == VICTIM else 0
            # Without this variable, a restart with Gloo reads the addresses of the last attempt, and hangs.
            job = started(command, folder, status, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            agents.append(stack.enter_context(job))
        wait_for_part_of_a_step(folder, phase, agents[0])
        agent = psutil.Process(agents[VICTIM].pid)
        (worker,) = agent.children()
        killed_ns = kill_host(agent, worker.pid)
    return next_step_s(folder, killed_ns)


def wait_for_part_of_a_step(folder: Path, phase: float, job: subprocess.Popen[bytes]) -> None:
    """Wait until a part of a step after step LOST_AFTER."""
    done = wait_for_step(folder, LOST_AFTER, 0, job)
    time.sleep(phase * (done[-1].end_ns - done[-2].end_ns) / 1e9)


def kill_host(agent: psutil.Process, worker_pid: int) -> int:
    """Kill an agent and all its processes. Return the time before (CLOCK_MONOTONIC, ns)."""
    processes = [agent, *agent.children(recursive=True)]
    assert worker_pid in {process.pid for process in processes}
    killed_ns = time.monotonic_ns()
    for process in processes:
        process.send_signal(signal.SIGKILL)
    return killed_ns


def next_step_s(folder: Path, killed_ns: int) -> float:
    """Return the seconds until the workers of all hosts but one have completed a step of the next world."""
    ends = [[step.end_ns for step in steps if step.generation == 2] for steps in read_steps(folder).values()]
    first = [min(found) for found in ends if found]
    assert len(first) == len(HOSTS) - 1, f"{len(first)} of {len(HOSTS) - 1} workers trained after the loss"
    assert min(first) > killed_ns
    return (max(first) - killed_ns) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
        "commit": lambda args: [commits(args.rounds)],
        "replication": lambda args: [replication(args.rounds)],
        "step": lambda args: [steps(args.rounds)],
        "loss": lambda args: lost_host(max(1, args.rounds // 3), args.disk),
    }
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--rounds", type=int, default=15, help="a third of them for lost hosts")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="for checkpoints")
    args = parser.parse_args()
    found = [figure for name in args.parts for figure in parts[name](args)]
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {elastic.device()}, ", end="")
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{len(os.sched_getaffinity(0))} cores, load {load}; {args.rounds} rounds.\n")
    sizes = ", ".join(f"{name} {size.state_bytes / 1e6:.0f} MB" for name, size in SIZES.items())
    print(f"State on all ranks: {sizes}.\n")
    row("", "elasticstate", "peer", "ratio (lowest to highest)", "goal", "")
    row(*["---"] * 6)
    for figure in found:
        figure.print()
    return 0 if all(figure.is_met for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
