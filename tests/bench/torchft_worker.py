"""Replica group of one worker for torchft, with the settings of its DDP example. It heals newcomers over HTTP.

Runs with an interpreter that has torchft (``bench_joins.py --torchft PYTHON``).
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from workload import StepLog, make_training, train_step, warm_up, warm_up_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="number of replicas after the join")
    parser.add_argument("--steps-after", type=int, required=True, help="steps with all replicas, the last ones")
    parser.add_argument("--loses", action="store_true", help="one replica is killed and returns; the steps follow")
    parser.add_argument("--returns", action="store_true", help="this is the one that returns")
    parser.add_argument("--warm-up", action="store_true", help="compute gradients before the first step")
    args = parser.parse_args()

    model, sgd = make_training()
    warm_up()
    if args.warm_up:
        warm_up_steps(model)
    log = StepLog(args.folder)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        replica_id=f"bench_{args.replica}",
        timeout=timedelta(seconds=10),
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
    was_whole = False
    after, generation, last = 0, 2 if args.returns else 1, 3 if args.loses else 2
    while after < args.steps_after:
        end_ns = train_step(ddp, optimizer, manager.current_step(), args.replica)
        is_whole = manager.num_participants() == args.size
        if is_whole and generation == last - 1:
            generation = last
        elif args.loses and generation == 1 and was_whole and not is_whole:
            generation = 2
        was_whole = is_whole
        log.write(manager.current_step(), generation, args.replica, end_ns)
        after += generation == last
    sys.stdout.flush()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
