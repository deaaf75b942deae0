"""Worker that runs a few steps and records its times, started by hand (``env://``), by torchrun or by elasticrun."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog, make_training, train_step

STEPS = 2
marks: list[str] = []


def mark(part: str) -> None:
    """Record that a part of the start has ended."""
    marks.append(f"{part} {time.monotonic_ns()}\n")


def train_plain(log: StepLog) -> None:
    model, optimizer = make_training()
    mark("model")
    dist.init_process_group("gloo")
    mark("world")
    ddp = DistributedDataParallel(model)
    for step in range(STEPS):
        log.write(step, 1, dist.get_rank(), train_step(ddp, optimizer, step, dist.get_rank()))
    dist.destroy_process_group()


def train_elastic(log: StepLog) -> None:
    import elasticstate as elastic

    model, optimizer = make_training()
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    mark("model")

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        mark("world")
        ddp = DistributedDataParallel(state.model, init_sync=False)
        while state.step < STEPS:
            end_ns = train_step(ddp, state.optimizer, state.step, elastic.rank())
            log.write(state.step, elastic.generation(), elastic.rank(), end_ns)
            state.step += 1
            state.commit()

    train(state)


def main() -> None:
    mark("import")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--elastic", action="store_true")
    args = parser.parse_args()
    train = train_elastic if args.elastic else train_plain
    train(StepLog(args.folder))
    (args.folder / f"{os.getpid()}.marks").write_text("".join(marks))


if __name__ == "__main__":
    main()
