"""A tiny training with LocalSGD or DiLoCo, which logs all its values at the begin of each world and at each commit.

Each worker trains on samples of its slot, and on a number of them that depends on slot and step. The lines of
``<log>/<host>-<slot>-<incarnation>.jsonl`` are those of train.py, with ``inner``, ``outer``, ``momentum``, ``samples``.
"""

from __future__ import annotations

import fast_import  # noqa: F401  # isort: skip - first

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from faults import Fault, Faults
from inner_steps import OUTER, flat, inner_step, make_training, momentum_of, samples_of

import elasticstate as elastic
from elasticstate.local_sgd import DiLoCo, LocalSGD


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--until", type=Path, required=True, help="train on until this file exists")
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--fragments", type=int, default=0, help="0: LocalSGD")
    parser.add_argument("--commit-every", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[], type=Fault.parse)
    args = parser.parse_args()
    slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
    slot = int(slot_id.split("-")[1])
    log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
    faults = Faults(args.fault, args.log)
    torch.set_num_threads(1)
    model, optimizer = make_training(slot)  # newcomers start with other weights
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    settings = {"every": args.every, "commit_every": args.commit_every}
    if args.fragments:
        diloco = DiLoCo(state, outer=lambda ps: torch.optim.SGD(ps, **OUTER), fragments=args.fragments, **settings)
    else:
        diloco = LocalSGD(state, **settings)
    faults.arm()

    def note(what: str) -> None:
        values = {
            "inner": flat(model.parameters()),
            "outer": flat(state.local_sgd["parameters"]),
            "momentum": momentum_of(model, optimizer),
            "samples": diloco.state_dict()["samples"],
        }
        place = {"slot": slot, "rank": elastic.rank(), "generation": elastic.generation(), "size": elastic.size()}
        line = {"what": what, "pid": os.getpid(), "time": time.monotonic(), "step": state.step, **place, **values}
        log.write(json.dumps(line) + "\n")

    def is_over() -> bool:
        """Return the same on all ranks."""
        flag = torch.tensor(int(args.until.exists()))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        note("enter")
        while state.step % args.every or not is_over():
            faults.at("step", rank=elastic.rank(), step=state.step)
            inner_step(model, optimizer, slot, state.step)
            time.sleep(0.005 * (slot + 1))
            state.step += 1
            note("trained")
            before = state.commits
            try:
                diloco.step(samples=samples_of(slot, state.step - 1))
            finally:
                if state.commits != before:
                    note("commit")
        diloco.outer_step()
        state.check()

    train(state)
    note("final")


if __name__ == "__main__":
    main()
