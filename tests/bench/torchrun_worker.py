"""Worker for torchrun: a failure restarts all workers, which load the checkpoint that rank 0 writes at every step."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog, make_training, train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--checkpoint", type=Path, required=True, help="in memory: a file under /dev/shm")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()

    generation = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, optimizer = make_training()
    step = 0
    if args.checkpoint.exists():
        checkpoint = torch.load(args.checkpoint)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp = DistributedDataParallel(model)
    log = StepLog(args.folder)
    while step < args.steps:
        end_ns = train_step(ddp, optimizer, step, rank)
        step += 1
        if rank == 0:
            written = args.checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, written)
            written.replace(args.checkpoint)
        log.write(step, generation, rank, end_ns, time.monotonic_ns() - end_ns)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
