"""Cost of --metrics and --dashboard: a training step, and the driver's CPU time, with and without.

Two jobs of two workers each take turns to train: one without the options, one with them. In the first half nobody
looks: the options alone. In the second half, while the job with the options trains, a page of its dashboard is open and
its metrics are scraped every 5 s. A ratio is that of two neighbouring turns. The table has medians, with the quartiles
in brackets:

- step: wall time of a step
- worker: CPU time of a worker for a step
- driver: CPU time of the driver while its job trains; and its share of a core, without and with the options

All processes share the cores of this machine, so other load on it widens the spread of the wall times. Prints markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from watching import cpu_s, watched

import elasticstate as elastic

WORKERS, STEPS, TIMEOUT_S = 2, 20, 120.0
GOAL_STEP, GOAL_DRIVER = 1.002, 1.2
HALVES = ("nobody looks", "a page open")
Turn = tuple[
    float, float, float
]  # wall time of a step, CPU time of a worker for a step, share of a core for the driver


def train(address: str, width: int) -> None:
    """Run in each worker: make as many steps as rank 0 is asked for, and let rank 0 answer with their times."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def run(state: elastic.TorchState) -> None:
        ddp = DistributedDataParallel(model)
        x = torch.randn(64, width)
        requests = Client(address, "AF_UNIX") if elastic.rank() == 0 else None
        while steps := asked(requests):
            wall_s, worker_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
                state.step += 1
                state.commit(every=50)
            if requests is not None:
                requests.send(((time.perf_counter() - wall_s) / steps, (time.process_time() - worker_s) / steps))

    run(state)


def asked(requests: Connection | None) -> int:
    """Return the number of steps that rank 0 is asked for; the same on all ranks."""
    steps = torch.tensor([requests.recv() if requests is not None else 0])
    dist.broadcast(steps, 0)
    return int(steps.item())


class Job:
    """A job that trains on request."""

    def __init__(self, folder: Path, width: int, *options: str) -> None:
        self._log = folder / "log"
        folder.mkdir()
        address = str(folder / "requests")
        script = [sys.executable, __file__, "--width", str(width), "--worker", address]
        command = [sys.executable, "-m", "elasticstate", "-np", str(WORKERS), *options, "--", *script]
        with Listener(address, "AF_UNIX") as listener, open(self._log, "wb") as log:
            self._driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            self._requests = listener.accept()

    def port(self, name: str) -> int:
        """Return the port of the dashboard or the metrics."""
        found = re.search(rf"{name}: http://127\.0\.0\.1:(\d+)/", self._log.read_text())
        assert found is not None, self._log.read_text()
        return int(found[1])

    def train(self, seconds: float) -> Turn:
        before, begun = cpu_s(self._driver.pid), time.monotonic()
        found = []
        while time.monotonic() < begun + seconds:
            self._requests.send(STEPS)
            assert self._requests.poll(TIMEOUT_S), self._log.read_text()
            found.append(self._requests.recv())
        driver = (cpu_s(self._driver.pid) - before) / (time.monotonic() - begun)
        step_s, worker_s = (median(times) for times in zip(*found, strict=True))
        return step_s, worker_s, driver

    def close(self) -> None:
        self._requests.send(0)
        assert self._driver.wait(TIMEOUT_S) == 0, self._log.read_text()


def pair(plain: Job, other: Job, seconds: float, is_open: bool) -> tuple[Turn, Turn]:
    """Let both jobs train, without and with the options."""
    without = plain.train(seconds)
    with watched(other.port("dashboard"), other.port("metrics")) if is_open else contextlib.nullcontext():
        return without, other.train(seconds)


def row(way: str, pairs: list[tuple[Turn, Turn]]) -> str:
    """Return a row of the table: ratios with their quartiles, and the driver's shares of a core."""
    ratios = zip(*([ours / theirs for theirs, ours in zip(*turns, strict=True)] for turns in pairs), strict=True)
    cells = [quantiles(values, n=4) for values in ratios]
    shown = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in cells]
    shares = " → ".join(f"{median(turn[2] for turn in turns):.2%}" for turns in zip(*pairs, strict=True))
    return f"| {way}, {len(pairs)} pairs of turns | {' | '.join(shown)} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=260.0, help="of each half")
    parser.add_argument("--turn", type=float, default=4.0, help="seconds of a turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.worker, args.width)
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Job(Path(folder, "plain"), args.width)
        other = Job(Path(folder, "other"), args.width, "--metrics", "0", "--dashboard", "0")
        step_s, *_ = max(job.train(args.turn) for job in (plain, other))
        count = int(args.seconds / args.turn / 2)
        halves = {way: [pair(plain, other, args.turn, way == HALVES[1]) for _ in range(count)] for way in HALVES}
        plain.close()
        other.close()
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, step of {step_s * 1e3:.1f} ms\n")
    print("| with the options | step | worker | driver | driver, share of a core |\n|---|---|---|---|---|")
    for way, pairs in halves.items():
        print(row(way, pairs))
    print(f"\nGoals: step ≤ {GOAL_STEP}; driver, while nobody looks, ≤ {GOAL_DRIVER}.")


if __name__ == "__main__":
    main()
