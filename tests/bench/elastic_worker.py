"""Worker for elasticrun: commits at every step, and measures the cost of a tick at the end."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel
from workload import StepLog, make_training, train_step, warm_up_steps

import elasticstate as elastic

TICKS = 2_000
marks: list[str] = []


def mark(part: str) -> None:
    """Record that a part of a recovery has ended."""
    marks.append(f"{part} {time.monotonic_ns()}\n")


class MarkedState(elastic.TorchState):
    """State that records the start and the end of a restore. At the start the worker has left the old generation."""

    def restore(self) -> None:
        mark("sever")
        super().restore()
        mark("restore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--steps-after", type=int, required=True, help="steps in the last generation")
    parser.add_argument("--last", type=int, default=2, help="the last generation")
    parser.add_argument("--warm-up", action="store_true", help="compute gradients before the first READY")
    args = parser.parse_args()

    model, optimizer = make_training()
    log = StepLog(args.folder)
    state = MarkedState(model=model, optimizer=optimizer, step=0, last=None)

    @elastic.run(warmup=(lambda: warm_up_steps(model)) if args.warm_up else None)
    def train(state: elastic.TorchState) -> float:
        mark("regroup")
        if elastic.generation() >= args.last and state.last is None:
            state.last = state.step + args.steps_after
        ddp = DistributedDataParallel(state.model, init_sync=False)
        while state.last is None or state.step < state.last:
            end_ns = train_step(ddp, state.optimizer, state.step, elastic.rank())
            state.step += 1
            try:
                state.commit()
            finally:  # the step is complete, even if its commit is the last of the generation
                log.write(state.step, elastic.generation(), elastic.rank(), end_ns, time.monotonic_ns() - end_ns)
        start_ns = time.monotonic_ns()
        for _ in range(TICKS):
            state.check_host_updates()
        return (time.monotonic_ns() - start_ns) / TICKS

    tick_ns = train(state)
    (args.folder / f"{os.getpid()}.marks").write_text("".join(marks))
    if elastic.rank() == 0:
        (args.folder / "tick_ns").write_text(str(tick_ns))


if __name__ == "__main__":
    main()
