"""Replica group of one worker of bench_local_sgd.py for torchft: its LocalSGD or DiLoCo.

Runs with an interpreter that has torchft (``bench_local_sgd.py --torchft PYTHON``).
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from local_sgd_training import EVERY, OUTER, Meter, inner_step, make_training, read_text
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo, LocalSGD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--method", choices=["local-sgd", "diloco"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds to wait in each step")
    args = parser.parse_args()
    text = read_text()
    model, optimizer = make_training(args.seed)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"bench_{args.replica}",
        timeout=timedelta(seconds=20),
    )
    meter = Meter(args.folder, args.replica)
    if args.method == "local-sgd":
        context: Any = LocalSGD(manager, model, optimizer, sync_every=EVERY)
    else:
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        context = DiLoCo(manager, [model], optimizer, outer, sync_every=EVERY)
    with context:
        trained = 0
        while manager.current_step() * EVERY < args.steps:
            before = manager.current_step()
            inner_step(model, optimizer, text, args.seed, args.replica, trained, args.pace)
            trained += 1
            if manager.current_step() > before:
                meter.mark(manager.current_step() * EVERY)
    meter.write_result(model, text)
    sys.stdout.flush()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
