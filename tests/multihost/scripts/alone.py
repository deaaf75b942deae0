"""Workers that train independently: their ticks have no collective. Logs a line per commit in <log>/<host>-….jsonl."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import elasticstate as elastic

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--until", type=Path, required=True)
args = parser.parse_args()
slot_id = os.environ["ELASTICSTATE_WORKER"].replace(":", "-")
log = open(args.log / f"{slot_id}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
state = elastic.TorchState(model=torch.nn.Linear(2, 2), step=0)


def note(what: str) -> None:
    where = {"generation": elastic.generation(), "rank": elastic.rank(), "step": state.step}
    log.write(json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **where}) + "\n")


@elastic.run
def train(state: elastic.TorchState) -> None:
    note("enter")
    while not args.until.exists():
        time.sleep(0.02)
        state.step += 1
        state.commit()
        note("commit")


train(state)
