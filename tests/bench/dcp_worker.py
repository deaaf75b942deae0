"""Worker for torchrun: a failure restarts all workers, which load the newest checkpoint of all shards from a disk."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_training import SIZES, init_weights, make_training, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from workload import StepLog


def newest(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint; 0: there is none."""
    return max((int(path.parent.name) for path in checkpoints.glob("*/.metadata")), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory on a disk")
    parser.add_argument("--every", type=int, required=True, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()

    generation = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    rank, size = dist.get_rank(), SIZES[args.size]
    model, optimizer = make_training(size, device, dist.get_world_size())
    step = newest(args.checkpoints)
    if step:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.checkpoints / str(step))
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    else:
        init_weights(model, rank)
    log = StepLog(args.folder)
    while step < args.steps:
        train_step(model, optimizer, size, device, step, rank)
        step += 1
        end_ns = time.monotonic_ns()
        if step % args.every == 0:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.checkpoints / str(step))
        log.write(step, generation, rank, end_ns, time.monotonic_ns() - end_ns)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
