"""Cost of ``report_metric``: a small training step without it, and with four numbers in each step.

One job of two workers, whose steps come by turns without and with the calls (the loss as a tensor, and three floats),
so that other load on the machine changes both alike. A ratio is that of the median steps of one round. Prints the
median of the ratios, their quartiles, and the time of one call in a loop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median, quantiles

import torch
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

STEPS, TIMEOUT_S = 200, 600.0


def train(rounds: int) -> None:
    """Run in each worker. Rank 0 prints the result."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = elastic.TorchState(model=model, optimizer=optimizer)

    @elastic.run
    def run(state: elastic.TorchState) -> None:
        ddp, x = DistributedDataParallel(model), torch.randn(64, 128)

        def step(reports: bool) -> float:
            begun = time.perf_counter()
            optimizer.zero_grad()
            loss = ddp(x).square().mean()
            loss.backward()
            optimizer.step()
            if reports:
                elastic.report_metric("loss", loss)
                for name in ("lr", "accuracy", "samples per second"):
                    elastic.report_metric(name, 0.5)
            state.commit(every=50)
            return time.perf_counter() - begun

        def one_round() -> tuple[float, float]:
            """Return the times of the median steps without and with the calls."""
            times = [step(number % 2 == 1) for number in range(STEPS)]
            return median(times[::2]), median(times[1::2])

        one_round()
        figures = [one_round() for _ in range(rounds)]
        if elastic.rank() == 0:
            ratios = [having / without for without, having in figures]
            low, middle, high = quantiles(ratios)
            begun = time.perf_counter()
            for _ in range(100_000):
                elastic.report_metric("lr", 0.5)
            call_s = (time.perf_counter() - begun) / 100_000
            step_ms = 1000 * median(without for without, _ in figures)
            print(f"step of {step_ms:.1f} ms with 4 numbers: {middle:.4f} ({low:.4f} to {high:.4f})")
            print(f"{rounds} rounds of {STEPS} steps; one call: {1e6 * call_s:.1f} us", flush=True)

    run(state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.rounds)
        return 0
    command = [sys.executable, "-m", "elasticstate", "-np", "2", sys.executable, __file__, "--worker"]
    return subprocess.run([*command, "--rounds", str(arguments.rounds)], timeout=TIMEOUT_S).returncode


if __name__ == "__main__":
    sys.exit(main())
