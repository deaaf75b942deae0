"""Workers that join a world at the top of their script, before they make a state; see test_join_ahead.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import elasticstate as elastic
from elasticstate.options import worker_environment
from elasticstate.worker.run import join

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--dies", choices=["at the top", "in training", "with all"], required=True)
parser.add_argument("--damages", action="store_true", help="the second worker of slot 1 spoils what is in its memory")
parser.add_argument("--collective", action="store_true", help="at the top")
args = parser.parse_args()
environment = worker_environment()
assert environment is not None
_, slot, incarnation = environment.worker


def note(what: str, **values: object) -> None:
    line = {"what": what, "time": time.time(), "slot": slot, "incarnation": incarnation, **values}
    with (args.log / f"{slot}-{incarnation}.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")


def die(once: Callable[[], bool] = lambda: True) -> None:
    note("dies")
    while not once():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def all_have(what: str) -> bool:
    """Return True if both slots have logged ``what`` in their first incarnation."""
    logs = [args.log / f"{slot}-1.jsonl" for slot in (0, 1)]
    return all(f'"what": "{what}"' in log.read_text() for log in logs)


def spoil() -> None:
    """Damage the tensor in each buffer. A worker detects the damage when it reads the buffer, not when it opens it."""
    for index in (0, 1):
        with open(f"{environment.commits}.{index}.safetensors", "r+b") as buffer:
            length = int.from_bytes(buffer.read(8), "little")
            begin, _ = json.loads(buffer.read(length))["weights"]["data_offsets"]
            buffer.seek(8 + length + begin)
            buffer.write(b"\xff" * 64)


if args.damages and slot == 1 and incarnation == 2:
    spoil()
join(collectives=args.collective)
note("top", rank=elastic.rank(), size=elastic.size(), generation=elastic.generation())
if args.collective:
    dist.all_reduce(torch.ones(1))
if args.dies == "at the top" and slot == 1 and incarnation == 1:
    die(lambda: all_have("top"))
state = elastic.TorchState(weights=torch.zeros(100), step=0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    note("enter", step=state.step, weight=state.weights[0].item(), generation=elastic.generation())
    while state.step < 20:
        share = torch.ones(100) / elastic.size()
        dist.all_reduce(share)
        state.weights += share
        state.step += 1
        state.commit()
        first = incarnation == 1 and state.step == 10
        if first and args.dies == "with all":
            die(lambda: all_have("dies"))
        if first and args.dies == "in training" and slot == 1:
            die()


train(state)
note("final", weight=state.weights[0].item())
