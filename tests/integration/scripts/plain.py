"""A script for torchrun that does not import elasticstate. It logs its environment, its steps and its end."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--variables", default="", help="names of the environment variables to log, with commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-time", type=float, default=0.02)
    parser.add_argument("--fail-rank", type=int, help="rank that raises at step --fail-step of the first world")
    parser.add_argument("--fail-always", action="store_true")
    parser.add_argument("--fail-step", type=int, default=5)
    parser.add_argument("--run-rank", type=int, help="rank that uses elasticstate.run instead")
    args = parser.parse_args()
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def log(what: str, **fields: object) -> None:
        line = {"time": time.time(), "what": what, "rank": rank, "pid": os.getpid(), "restarts": restarts, **fields}
        with open(args.log / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    launched = dist.is_torchelastic_launched()
    log("begin", launched=launched, environment={name: os.environ.get(name) for name in args.variables.split(",")})
    if rank == args.run_rank:
        import elasticstate

        @elasticstate.run
        def train(state: elasticstate.State) -> None:
            raise AssertionError

        train(elasticstate.ObjectState(step=0))
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    step, snapshot = 0, args.log / "snapshot.pt"
    if snapshot.exists():
        loaded = torch.load(snapshot)
        model.load_state_dict(loaded["model"])
        step = loaded["step"]
    ddp = DistributedDataParallel(model)
    log("enter", step=step, size=dist.get_world_size())
    while step < args.steps:
        if rank == args.fail_rank and step == args.fail_step and (restarts == 0 or args.fail_always):
            raise ValueError("the script's own error")
        ddp(torch.ones(2, 4)).sum().backward()
        step += 1
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, snapshot.with_suffix(".new"))
            snapshot.with_suffix(".new").replace(snapshot)
        log("step", step=step)
        time.sleep(args.step_time)
    dist.destroy_process_group()
    log("final", step=step)


if __name__ == "__main__":
    main()
