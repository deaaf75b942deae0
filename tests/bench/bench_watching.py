"""Cost of --metrics and --dashboard: a training step, and the driver's CPU time, with and without.

Two jobs of two workers each take turns to train: one without the options, one with them. Two kinds of steps:

- a device computes: DDP forward, backward, all-reduce over Gloo, optimizer and ``commit()`` of a small model, then a
  wait of DEVICE_S, so that a step takes about 100 ms. The wait stands for the time in which the training thread of a
  GPU job waits for its device: the cores are free, as beside a GPU. It has a fixed length and begins after all else, so
  each delay of the thread, of either rank or of the all-reduce, makes the step longer; a late wake-up does, too. With a
  real device, kernels run meanwhile and hide such delays.
- all cores compute: a larger model without a wait. Other load on the machine spreads these steps by ten per cent, so
  they have no goal.

For each kind, first nobody looks: the options alone. Then, while the job with the options trains, a page of its
dashboard is open and its metrics are scraped every 5 s. A ratio is that of a turn with the options to one without. Both
turns of a pair come in slices of STEPS steps, one without the options before and one after two with them, so that load
that grows or falls changes both alike (half a turn before and half a turn after the page is open, which stays open for
its whole turn). Each pair of turns has two new jobs, because the CPU time of a driver at rest differs by ten per cent
from process to process. The columns have
the median of the ratios, the quartiles in brackets, and after that the 95 % interval of the median (of the sign test:
order statistics, without assumptions about the distribution):

- step: wall time of the median step of a turn
- tick: wall time of the median call of ``commit(every=50)`` of a turn
- worker: CPU time of a worker for a step
- driver: CPU time of the driver while its job trains; and its share of a core, without and with the options

Prints markdown. A goal is met if the whole interval is within it. Exits with 1 if one is missed or not shown.
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
from collections.abc import Iterator
from math import comb
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from watching import cpu_s, watched

import elasticstate as elastic

WORKERS, STEPS, TIMEOUT_S = 2, 20, 120.0
DEVICE_S = 0.096
LEAST_PAIRS = 6  # for an interval of 95 %
GOAL_STEP, GOAL_DRIVER = 1.002, 1.2
LOOKS = ("nobody looks", "a page open")
NOBODY = contextlib.nullcontext()


class Way(NamedTuple):
    """Kind of steps."""

    name: str
    width: int
    layers: int
    device_s: float
    has_goals: bool


WAYS = (Way("a device computes", 64, 4, DEVICE_S, True), Way("all cores compute", 256, 8, 0.0, False))


class Turn(NamedTuple):
    """Figures of one turn: times of one step, and the driver's share of a core."""

    step_s: float
    tick_s: float
    worker_s: float
    driver: float


class Slice(NamedTuple):
    """Some steps of a turn: wall times of each step and its tick, CPU time of a worker for one, CPU and wall time."""

    steps: list[tuple[float, float]]
    worker_s: float
    driver_s: float
    wall_s: float


def turn_of(slices: list[Slice]) -> Turn:
    step_s, tick_s = (median(times) for times in zip(*(step for one in slices for step in one.steps), strict=True))
    driver = sum(one.driver_s for one in slices) / sum(one.wall_s for one in slices)
    return Turn(step_s, tick_s, median(one.worker_s for one in slices), driver)


# ------------------------------------------------------------------------------------------------------------ workers


def train(address: str, way: Way) -> None:
    """Run in each worker: make as many steps as rank 0 is asked for, and let rank 0 answer with their times."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(way.width, way.width) for _ in range(way.layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def run(state: elastic.TorchState) -> None:
        ddp = DistributedDataParallel(model)
        x = torch.randn(64, way.width)
        requests = Client(address, "AF_UNIX") if elastic.rank() == 0 else None

        def step() -> tuple[float, float]:
            """Return the wall times of a step, and of the tick in it."""
            begun = time.perf_counter()
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            state.step += 1
            tick = time.perf_counter()
            state.commit(every=50)
            done = time.perf_counter()
            if way.device_s:
                time.sleep(way.device_s)
            return time.perf_counter() - begun, done - tick

        while steps := asked(requests):
            worker_s = time.process_time()
            times = [step() for _ in range(steps)]
            if requests is not None:
                requests.send((times, (time.process_time() - worker_s) / steps))

    run(state)


def asked(requests: Connection | None) -> int:
    """Return the number of steps that rank 0 is asked for; the same on all ranks."""
    steps = torch.tensor([requests.recv() if requests is not None else 0])
    dist.broadcast(steps, 0)
    return int(steps.item())


# --------------------------------------------------------------------------------------------------------------- jobs


class Job:
    """A job that trains on request."""

    def __init__(self, folder: Path, way: Way, *options: str) -> None:
        self._log = folder / "log"
        folder.mkdir()
        address = str(folder / "requests")
        script = [sys.executable, __file__, "--way", way.name, "--worker", address]
        command = [sys.executable, "-m", "elasticstate", "-np", str(WORKERS), *options, "--", *script]
        with Listener(address, "AF_UNIX") as listener, open(self._log, "wb") as log:
            self._driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            self._requests = listener.accept()

    @property
    def pid(self) -> int:
        return self._driver.pid

    def port(self, name: str) -> int:
        """Return the port of the dashboard or the metrics."""
        found = re.search(rf"{name}: http://127\.0\.0\.1:(\d+)/", self._log.read_text())
        assert found is not None, self._log.read_text()
        return int(found[1])

    def train(self) -> Slice:
        """Train for STEPS steps."""
        before, begun = cpu_s(self.pid), time.monotonic()
        self._requests.send(STEPS)
        assert self._requests.poll(TIMEOUT_S), self._log.read_text()
        steps, worker_s = self._requests.recv()
        return Slice(steps, worker_s, cpu_s(self.pid) - before, time.monotonic() - begun)

    def close(self) -> None:
        self._requests.send(0)
        assert self._driver.wait(TIMEOUT_S) == 0, self._log.read_text()


@contextlib.contextmanager
def jobs(way: Way) -> Iterator[tuple[Job, Job]]:
    """Run a job without the options and one with them, and warm both up."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        plain, other = (
            running.enter_context(contextlib.closing(Job(Path(folder, name), way, *options)))
            for name, options in (("plain", ()), ("other", ("--metrics", "0", "--dashboard", "0")))
        )
        for job in (plain, other):
            job.train()
        yield plain, other


def measure(way: Way, count: int, turn_s: float) -> dict[str, list[tuple[Turn, Turn]]]:
    """Let two jobs train by turns. Return pairs of turns, without and with the options."""
    found: dict[str, list[tuple[Turn, Turn]]] = {look: [] for look in LOOKS}
    for number in range(count):
        with jobs(way) as (plain, other):
            for look in LOOKS:
                print(f"{way.name}, {look}: pair {number + 1} of {count}", file=sys.stderr)
                found[look].append(pair(plain, other, look, turn_s))
    return found


def pair(plain: Job, other: Job, look: str, turn_s: float) -> tuple[Turn, Turn]:
    """Let both jobs train for about this long, by turns."""
    theirs: list[Slice] = [plain.train()]
    ours: list[Slice] = []
    halves = max(1, round(turn_s / theirs[0].wall_s / 2))  # slices in half a turn
    blocks, count = (1, halves) if look == LOOKS[1] else (halves, 1)
    for _ in range(blocks):
        theirs += [plain.train() for _ in range(count)]
        with watched(other.port("dashboard"), other.port("metrics")) if look == LOOKS[1] else NOBODY:
            ours += [other.train() for _ in range(2 * count)]
        theirs += [plain.train() for _ in range(count)]
    return turn_of(theirs[1:]), turn_of(ours)


# ------------------------------------------------------------------------------------------------------------ figures


def interval(values: list[float]) -> tuple[float, float]:
    """Return the interval that has the median with a probability of at least 95 %: the sign test, turned around."""
    ordered, count = sorted(values), len(values)
    below, rank = 2.0**-count, 0  # probability that at most ``rank`` values are below the median
    while below + comb(count, rank + 1) / 2.0**count <= 0.025:
        rank += 1
        below += comb(count, rank) / 2.0**count
    return ordered[rank], ordered[count - 1 - rank]


class Ratio(NamedTuple):
    """Ratios of a figure over all pairs of turns."""

    middle: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]

    def __str__(self) -> str:
        digits = 4 if self.quartiles[1] - self.quartiles[0] < 0.02 else 2
        low, high, least, most = (f"{value:.{digits}f}" for value in (*self.quartiles, *self.interval))
        return f"{self.middle:.{digits}f} ({low} to {high}), {least} to {most}"

    def verdict(self, goal: float) -> str:
        return "met" if self.interval[1] <= goal else "MISSED" if self.interval[0] > goal else "not shown"


def ratios(pairs: list[tuple[Turn, Turn]]) -> list[Ratio]:
    """Return the ratios of all figures of a turn."""
    found = []
    for without, with_options in zip(*(zip(*turns, strict=True) for turns in zip(*pairs, strict=True)), strict=True):
        values = [ours / theirs for theirs, ours in zip(without, with_options, strict=True)]
        low, middle, high = quantiles(values, n=4)
        found.append(Ratio(middle, (low, high), interval(values)))
    return found


def row(way: Way, look: str, pairs: list[tuple[Turn, Turn]]) -> str:
    """Return a row of the table: ratios, and what the driver and the ticks are without and with the options."""
    ticks = " → ".join(f"{median(turn.tick_s for turn in turns) * 1e6:.0f}" for turns in zip(*pairs, strict=True))
    shares = " → ".join(f"{median(turn.driver for turn in turns):.2%}" for turns in zip(*pairs, strict=True))
    step_s = median(plain.step_s for plain, _ in pairs)
    first = f"{way.name} (step of {step_s * 1e3:.1f} ms), {look}, {len(pairs)} pairs"
    return f"| {first} | {' | '.join(map(str, ratios(pairs)))} | {ticks} µs | {shares} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16, help="of turns with a device; half as many without")
    parser.add_argument("--turn", type=float, default=10.0, help="seconds of a turn, about")
    parser.add_argument("--way", choices=[way.name for way in WAYS], help="kind of steps; without it: both")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.worker, next(way for way in WAYS if way.name == args.way))
        return 0
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}; load average before: {load()}\n")
    print("| with the options | step | tick | worker | driver | tick, wall time | driver, share of a core |")
    print("|---|---|---|---|---|---|---|", flush=True)
    verdicts = []
    for way in WAYS if args.way is None else [way for way in WAYS if way.name == args.way]:
        count = max(LEAST_PAIRS, args.pairs if way.has_goals else args.pairs // 2)
        for look, pairs in measure(way, count, args.turn).items():
            print(row(way, look, pairs), flush=True)
            if way.has_goals:
                step, _, _, driver = ratios(pairs)
                verdicts.append((f"{look}: step ≤ {GOAL_STEP}", step.verdict(GOAL_STEP)))
                verdicts.append((f"{look}: driver ≤ {GOAL_DRIVER}", driver.verdict(GOAL_DRIVER)))
    print(f"\nLoad average after: {load()}\n\n" + "\n".join(f"- {goal}: {verdict}" for goal, verdict in verdicts))
    return int(any(verdict != "met" for _, verdict in verdicts))


def load() -> str:
    """Return the load averages of 1 and 15 minutes."""
    last, _, long = os.getloadavg()
    return f"{last:.2f} (1 min), {long:.2f} (15 min)"


if __name__ == "__main__":
    sys.exit(main())
