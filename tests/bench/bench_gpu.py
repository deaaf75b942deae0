"""Cost of a commit from a GPU, measured alternately with torch's own copies into pinned memory.

A worker under ``elasticrun`` runs a simulated training on one GPU. Its state is parameters and momentum, half of the
bytes each, in tensors of 64 MB. A step is matrix products, for as long as two copies of the state take, and
``optimizer.step()``.

- stall: additional time of ten steps when the first one begins with a commit. The goal is at most 5 % of a blocking
  copy of the state into torch's pinned memory.
- copy: from the call of ``commit()`` on an idle GPU until all bytes are in the shared memory, compared with torch's
  copy
  into its own pinned memory. The goal is at least 0.9 of its speed. Checksum and seal follow later, on the CPU.
- restore: ``restore()``, checksum verified, compared with torch's copy out of pinned memory.

Figures are medians over the rounds; ratios are medians of the ratios of each round. Prints markdown. Exits with 1 if a
goal is missed, and with 0 and the reason if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import elasticstate as elastic
from elasticstate.state.async_commit import copy_stream_of
from elasticstate.state.base import committer_of

TENSOR_BYTES = 64 << 20
STEPS = 10  # per round, with one commit or none
GOAL_STALL, GOAL_COPY = 0.05, 0.9
SIDE = 4096  # side of the square matrices


class Workload:
    """Simulated training that loads the GPU like a real one."""

    def __init__(self, total_bytes: int, device: torch.device) -> None:
        count, elements = max(1, total_bytes // TENSOR_BYTES // 2), TENSOR_BYTES // 4
        self.parameters = [torch.nn.Parameter(torch.rand(elements, device=device)) for _ in range(count)]
        self.gradients = [torch.rand_like(parameter) for parameter in self.parameters]
        optimizer = torch.optim.SGD(self.parameters, lr=1e-3, momentum=0.9)
        self.give_gradients()
        optimizer.step()
        self.state = elastic.TorchState(model=torch.nn.ParameterList(self.parameters), optimizer=optimizer, step=0)
        self.device = device
        self.matrix = torch.rand(SIDE, SIDE, device=device)
        self.products = 1

    def give_gradients(self) -> None:
        """Set the gradients again. A restore clears them."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    @property
    def tensors(self) -> list[torch.Tensor]:
        momentum = [self.state.optimizer.state[p]["momentum_buffer"] for p in self.parameters]
        return [*(p.detach() for p in self.parameters), *momentum]

    def calibrate(self, seconds: float) -> None:
        """Choose the number of matrix products so that forward and backward take ``seconds``."""

        def some() -> None:
            for _ in range(20):
                self.matrix @ self.matrix

        self.timed(some)
        self.products = max(1, round(20 * seconds / self.timed(some)))

    def timed(self, work: Callable[[], object]) -> float:
        """Return the seconds until the GPU has completed ``work``."""
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def steps(self, commits: bool) -> None:
        self.give_gradients()
        for step in range(STEPS):
            if commits and step == 0:
                self.state.commit()
            for _ in range(self.products):
                self.matrix @ self.matrix
            self.state.optimizer.step()

    def copy_of_commit(self) -> float:
        """Return the seconds from the call of ``commit()`` until all bytes are in the shared memory."""
        copy_stream = copy_stream_of(self.device)
        assert copy_stream is not None
        committer_of(self.state).settle()
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        self.state.commit()
        copy_stream.mark().wait()
        return time.perf_counter() - started


def measure(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each measurement in each round."""
    tensors = workload.tensors
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    state = workload.state

    def out() -> None:
        torch._foreach_copy_(pinned, tensors, non_blocking=True)

    def back() -> None:
        torch._foreach_copy_(tensors, pinned, non_blocking=True)

    def settled() -> None:
        state.commit()
        committer_of(state).settle()

    for _ in range(2):  # both buffers
        settled()
        workload.timed(out)
    workload.calibrate(2 * workload.timed(out))
    workload.steps(False)
    ways: dict[str, Callable[[], float]] = {
        "blocking": lambda: workload.timed(out),
        "copy": workload.copy_of_commit,
        "sealed": lambda: workload.timed(settled),
        "plain": lambda: workload.timed(lambda: workload.steps(False)),
        "committing": lambda: workload.timed(lambda: workload.steps(True)),
        "back": lambda: workload.timed(back),
        "restore": lambda: workload.timed(state.restore),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            committer_of(state).settle()
            found[name].append(ways[name]())
    return found


def work(total_bytes: int, rounds: int, result: Path) -> None:
    """Run as a worker, so that its commits are in the commit storage that its agent made."""
    workload = Workload(total_bytes, torch.device("cuda", torch.cuda.current_device()))

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        assert state is workload.state
        result.write_text(json.dumps(measure(workload, rounds)))

    train(workload.state)


def report(found: dict[str, list[float]], total_bytes: int, rounds: int) -> bool:
    """Print all figures. Return True if the goals are met."""
    middle = {name: median(seconds) for name, seconds in found.items()}
    stall = median(c - p for c, p in zip(found["committing"], found["plain"], strict=True))
    part = median((c - p) / b for c, p, b in zip(found["committing"], found["plain"], found["blocking"], strict=True))
    speed = median(b / c for b, c in zip(found["blocking"], found["copy"], strict=True))
    restore = median(b / r for b, r in zip(found["back"], found["restore"], strict=True))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}; a state of "
        f"{total_bytes / 2**30:.1f} GiB, steps of {middle['plain'] / STEPS * 1e3:.0f} ms, medians of {rounds} rounds.\n"
    )
    print("| blocking copy | copy of a commit | commit until sealed | stall of a commit | copy back | restore |")
    print("|---|---|---|---|---|---|")
    cells = [middle["blocking"], middle["copy"], middle["sealed"], stall, middle["back"], middle["restore"]]
    print("| " + " | ".join(f"{seconds * 1e3:.1f} ms" for seconds in cells) + " |\n")
    stalls_little, copies_fast = part <= GOAL_STALL, speed >= GOAL_COPY
    print(f"- stall {part:.3f} of a blocking copy, goal ≤ {GOAL_STALL}: {'met' if stalls_little else 'MISSED'}")
    print(f"- copy at {speed:.2f} of torch's speed, goal ≥ {GOAL_COPY}: {'met' if copies_fast else 'MISSED'}")
    print(f"- restore at {restore:.2f} of torch's speed, the checksum included")
    return stalls_little and copies_fast


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the state; the GPU needs twice as much")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"nothing is measured: torch {torch.__version__} finds no CUDA device here")
        return 0
    total_bytes = int(args.gigabytes * 2**30) // (2 * TENSOR_BYTES) * 2 * TENSOR_BYTES
    if args.result:
        work(total_bytes, args.rounds, args.result)
        return 0
    with tempfile.TemporaryDirectory(prefix="elasticstate-bench-") as folder:
        result = Path(folder) / "result"
        own = [sys.executable, __file__, "--gigabytes", str(args.gigabytes), "--rounds", str(args.rounds)]
        command = [sys.executable, "-m", "elasticstate", "-np", "1", "--", *own, "--result", str(result)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return 0 if report(json.loads(result.read_text()), total_bytes, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
