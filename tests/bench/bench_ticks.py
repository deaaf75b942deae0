"""Cost of tick records: a step of plain DDP, and the same step with ``commit(every=50)``, alternately in one job.

The job trains a model of 250 parameters with AdamW, 1,000 tensors in all, on two workers. Blocks of steps without and
with ``commit`` alternate. *Blocks* is the median ratio of neighbouring blocks. *Step* is a block with commits, divided
by the same block without the time inside ``commit``: load on the machine changes it less, so it has the goal. *Record*
is the time of a call that does not commit: between training steps, with cold caches (lower quartile), and repeated at
once (hot). Prints markdown. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

EVERY = 50  # steps of a block, and between two commits
GOAL_RATIO, GOAL_RECORD_S = 1.01, 60e-6
WORKERS = 2


def train(pairs: int, width: int, batch: int, out: Path) -> None:
    """Run in each worker: train, and let rank 0 write its figures."""
    torch.set_num_threads(1)
    layers = [part for _ in range(125) for part in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    state = elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule, step=0)

    @elastic.run
    def run(state: elastic.TorchState) -> dict[str, Any]:
        ddp = DistributedDataParallel(model)
        x = torch.randn(batch, width)
        blocks: dict[bool, list[float]] = {False: [], True: []}
        calls: list[float] = []
        for block in range(2 * pairs + 2):
            commits = block % 2 == 1
            started = time.perf_counter()
            for _ in range(EVERY):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
                schedule.step()
                state.step += 1
                if commits:
                    before = time.perf_counter()
                    state.commit(every=EVERY)
                    calls.append(time.perf_counter() - before)
            blocks[commits].append(time.perf_counter() - started)
        state.commit(every=10**6)
        hot = []
        for _ in range(1000):
            before = time.perf_counter()
            state.commit(every=10**6)
            hot.append(time.perf_counter() - before)
        records = [seconds for i, seconds in enumerate(calls[EVERY:]) if (i + 1) % EVERY]
        tensors = sum(isinstance(value, torch.Tensor) for value in state.capture().values())
        figures = {"plain": blocks[False][1:], "ticks": blocks[True][1:], "inside": sum(calls[EVERY:])}
        return {**figures, "records": records, "hot": median(hot), "tensors": tensors}

    found = run(state)
    if elastic.rank() == 0:
        out.write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.pairs, args.width, args.batch, args.worker)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        script = [sys.executable, __file__, *sys.argv[1:], "--worker", str(out)]
        subprocess.run(
            [sys.executable, "-m", "elasticstate", "-np", str(WORKERS), "--tick-records", "--", *script], check=True
        )
        found = json.loads(out.read_text())
    blocks = median(ours / plain for ours, plain in zip(found["ticks"], found["plain"], strict=True))
    ratio = sum(found["ticks"]) / (sum(found["ticks"]) - found["inside"])
    cold, _, _ = quantiles(found["records"], n=4)
    print(f"\n{WORKERS} workers, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}\n")
    print("| tensors | step of plain DDP | blocks | step | record, cold | hot |\n|---|---|---|---|---|---|")
    step_ms = median(found["plain"]) / EVERY * 1e3
    cells = f"{found['tensors']} | {step_ms:.1f} ms | {blocks:.3f} | {ratio:.4f}"
    cells += f" | {cold * 1e6:.0f} µs | {found['hot'] * 1e6:.0f} µs"
    print(f"| {cells} |\n\nGoals: step ≤ {GOAL_RATIO} of plain DDP's, hot record ≤ {GOAL_RECORD_S * 1e6:.0f} µs.")
    return int(ratio > GOAL_RATIO or found["hot"] > GOAL_RECORD_S)


if __name__ == "__main__":
    sys.exit(main())
