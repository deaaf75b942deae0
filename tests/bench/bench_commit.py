"""Cost of a commit, a restore and a tick, measured alternately with other ways to copy the same bytes.

The state is a module and an SGD optimizer with momentum, half of the bytes each, in tensors of one size: 1 GB in
tensors of 64 MB, 4 MB, 1 MB and 64 KB, and 100,000 tensors of 1 KB.

- commit: ``TorchState.commit()``, checksum and seal included; restore: ``restore()``, checksum verified.
- deepcopy: ``copy.deepcopy`` of both state dicts.
- foreach: ``torch._foreach_copy_`` into tensors that are allocated once.
- memcpy: memcpy of the C library, for as many bytes in one flat buffer, with as many threads as a commit. The limit.

All memory has been touched before. Only a deep copy allocates fresh pages; that is part of its cost. Figures are
medians over the rounds; ratios are medians of the ratios of each round. Goals are ratios, so load on the machine does
not cause misses. For a missed goal, the bench prints bytes and page faults, which show where the time goes. Prints
markdown.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

import elasticstate as elastic

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
STATES = {
    "64 MB": (64 * MB, GB),
    "4 MB": (4 * MB, GB),
    "1 MB": (MB, GB),
    "64 KB": (64 * KB, GB),
    "1 KB": (KB, 100_000 * KB),
}
THREADS = min(4, len(os.sched_getaffinity(0)))
BATCH, TICK_BATCHES = 10_000, 21
GOAL_TICK_CALLS = 25.0


# ------------------------------------------------------------------------------------------------------ one state


def make_state(tensor_bytes: int, total_bytes: int) -> elastic.TorchState:
    elements = tensor_bytes // 4
    parameters = [torch.nn.Parameter(torch.rand(elements)) for _ in range(total_bytes // tensor_bytes // 2)]
    model = torch.nn.ParameterList(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.rand(elements)
    optimizer.step()
    optimizer.zero_grad()
    return elastic.TorchState(model=model, optimizer=optimizer, step=0)


class Memcpy:
    """Copier of one flat buffer to another, in equal parts, on THREADS threads."""

    def __init__(self, total_bytes: int) -> None:
        self._source = torch.ones(total_bytes, dtype=torch.uint8)
        self._target = torch.ones(total_bytes, dtype=torch.uint8)
        self._memcpy = ctypes.CDLL(None).memcpy  # ctypes releases the GIL
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memcpy.restype = ctypes.c_void_p
        self._pool = ThreadPoolExecutor(THREADS - 1) if THREADS > 1 else None
        self._part = total_bytes // THREADS

    def _copy(self, i: int) -> None:
        start = i * self._part
        self._memcpy(self._target.data_ptr() + start, self._source.data_ptr() + start, self._part)

    def __call__(self) -> None:
        others = [self._pool.submit(self._copy, i) for i in range(1, THREADS)] if self._pool else []
        self._copy(0)
        for other in others:
            other.result()


def candidates(state: elastic.TorchState, total_bytes: int) -> dict[str, Callable[[], object]]:
    tensors = [value for value in state.capture().values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == total_bytes
    kept = [torch.ones_like(tensor) for tensor in tensors]
    saved: list[Any] = [None]

    def deepcopy() -> None:
        saved[0] = copy.deepcopy([state.model.state_dict(), state.optimizer.state_dict()])

    def foreach() -> None:
        with torch.no_grad():
            torch._foreach_copy_(kept, tensors)

    return {
        "commit": state.commit,
        "restore": state.restore,
        "deepcopy": deepcopy,
        "foreach": foreach,
        "memcpy": Memcpy(total_bytes),
    }


def measure(tensor_bytes: int, total_bytes: int, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return (seconds, page faults) of each candidate in each round."""
    torch.set_num_threads(THREADS)
    ways = candidates(make_state(tensor_bytes, total_bytes), total_bytes)
    for _ in range(2):  # both buffers
        for way in ways.values():
            way()
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.perf_counter()
            ways[name]()
            took = time.perf_counter() - start
            found[name].append((took, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
    return found


# --------------------------------------------------------------------------------------------------------- the tick


class Empty:
    def call(self) -> None:
        """Do nothing. Measures the cost of a method call."""


def batch_s(function: Callable[[], object]) -> float:
    """Return the seconds of one call, averaged over BATCH calls."""
    start = time.perf_counter()
    for _ in range(BATCH):
        function()
    return (time.perf_counter() - start) / BATCH


def count_ticks(result: Path) -> None:
    """Run as a worker: measure ``check_host_updates()`` and an empty method, alternately. Write the times to a file."""

    @elastic.run
    def train(state: elastic.ObjectState) -> list[tuple[float, float]]:
        return [(batch_s(state.check_host_updates), batch_s(Empty().call)) for _ in range(TICK_BATCHES)]

    result.write_text(json.dumps(train(elastic.ObjectState(step=0))))


def measure_ticks() -> list[tuple[float, float]]:
    """Return the seconds of a tick and of an empty method in each batch, from a real job of one worker."""
    with tempfile.TemporaryDirectory(prefix="elasticstate-bench-") as folder:
        result = Path(folder) / "tick"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "elasticstate",
                "-np",
                "1",
                "--",
                sys.executable,
                __file__,
                "--count-ticks",
                str(result),
            ],
            check=True,
            stdout=sys.stderr,
        )
        return [(tick, call) for tick, call in json.loads(result.read_text())]


# -------------------------------------------------------------------------------------------------------- the report


class Row:
    """Figures for tensors of one size."""

    def __init__(self, name: str, found: dict[str, list[tuple[float, int]]]) -> None:
        self.name = name
        self.tensor_bytes, self.total_bytes = STATES[name]
        self.found = found

    def seconds(self, way: str) -> float:
        return median(took for took, _ in self.found[way])

    def ratio(self, way: str, to: str) -> float:
        """Return the speed of ``way`` as a multiple of the speed of ``to``."""
        return median(b / a for (a, _), (b, _) in zip(self.found[way], self.found[to], strict=True))

    def microseconds_per_tensor(self) -> float:
        return self.seconds("commit") / (self.total_bytes // self.tensor_bytes) * 1e6

    def goals(self) -> list[tuple[str, float, float]]:
        """Return (what, figure, goal): the figure is a speed ratio within the same rounds, and must reach the goal.

        For the smallest tensors Python takes most of the time, in a commit as in a deep copy.
        """
        of_deepcopy = 5.0 if self.tensor_bytes >= 64 * MB else 1.0 if self.tensor_bytes >= 64 * KB else 6.0
        goals = [("commit of deepcopy", self.ratio("commit", "deepcopy"), of_deepcopy)]
        if self.tensor_bytes >= 64 * KB:
            goal = 0.85 if self.tensor_bytes >= MB else 0.5
            goals.append(("commit of memcpy", self.ratio("commit", "memcpy"), goal))
        if self.tensor_bytes >= MB:
            goals.append(("restore of memcpy", self.ratio("restore", "memcpy"), 0.8))
        return goals

    def account(self) -> str:
        """Return a text with the bytes and page faults of each way."""
        parts = []
        for way, figures in self.found.items():
            moved = 2 * self.total_bytes / MB
            faults = median(faults for _, faults in figures)
            speed = moved / 1024 / self.seconds(way)
            parts.append(f"{way} {moved:.0f} MB read and written, {speed:.1f} GB/s, {faults:.0f} page faults")
        return "; ".join(parts)


def calls_of_tick(batches: list[tuple[float, float]]) -> float:
    """Return the cost of a tick as a number of calls of an empty method."""
    return median(tick / call for tick, call in batches)


def report(rows: list[Row], rounds: int, batches: list[tuple[float, float]]) -> None:
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {THREADS} threads; "
        f"medians of {rounds} rounds.\n"
    )
    ways = ["commit", "restore", "deepcopy", "foreach", "memcpy"]
    print(
        "| tensors of |" + "".join(f" {way} |" for way in ways) + " commit of memcpy | of foreach | of deepcopy |",
        end="",
    )
    print(" restore of memcpy | commit, a tensor |")
    print("|---" * (len(ways) + 6) + "|")
    for row in rows:
        cells = [f"{row.seconds(way) * 1e3:.1f} ms" for way in ways]
        cells += [f"{row.ratio('commit', to):.2f}" for to in ("memcpy", "foreach", "deepcopy")]
        cells += [f"{row.ratio('restore', 'memcpy'):.2f}", f"{row.microseconds_per_tensor():.2f} µs"]
        print(f"| {row.name} | " + " | ".join(cells) + " |")
    print()
    for row in rows:
        for what, figure, goal in row.goals():
            print(f"- {row.name}: {what} {figure:.2f}, goal ≥ {goal}: {'met' if figure >= goal else 'MISSED'}")
        if not all(figure >= goal for _, figure, goal in row.goals()):
            print(f"  - {row.account()}")
    tick, calls = median(tick for tick, _ in batches), calls_of_tick(batches)
    met = "met" if calls <= GOAL_TICK_CALLS else "MISSED"
    print(
        f"- check_host_updates() {tick * 1e6:.2f} µs, as long as {calls:.1f} calls of an empty method, "
        f"goal ≤ {GOAL_TICK_CALLS:g}: {met}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES), help="sizes of the tensors")
    parser.add_argument("--measure", choices=STATES, help=argparse.SUPPRESS)
    parser.add_argument("--count-ticks", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count_ticks:
        count_ticks(args.count_ticks)
    elif args.measure:
        json.dump(measure(*STATES[args.measure], args.rounds), sys.stdout)
    else:
        rows = []
        for name in args.states:  # each in a fresh process, so that earlier allocations do not matter
            command = [sys.executable, __file__, "--measure", name, "--rounds", str(args.rounds)]
            print(f"tensors of {name}: {args.rounds} rounds", file=sys.stderr)
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append(Row(name, json.loads(found)))
        report(rows, args.rounds, measure_ticks())


if __name__ == "__main__":
    main()
