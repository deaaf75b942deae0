"""``without_collectives.py LOG``: workers that never wait for each other. Rank 1 dies in its tick 20."""

from __future__ import annotations

import fast_import  # noqa: F401  # isort: skip - first

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import elasticstate as elastic

log = open(Path(sys.argv[1]) / f"{os.environ['ELASTICSTATE_WORKER'].replace(':', '-')}.jsonl", "a", buffering=1)  # noqa: SIM115
state = elastic.TorchState(weight=torch.zeros(1000), step=0)


@elastic.run
def train(state: Any) -> None:
    log.write(json.dumps({"what": "enter", "time": time.time(), "step": state.step}) + "\n")
    while state.step < 300:
        state.weight += 1
        state.step += 1
        state.commit()
        if state.step == 20 and elastic.rank() == 1 and elastic.generation() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005 if elastic.generation() == 1 else 0.0)
    log.write(json.dumps({"what": "end", "time": time.time(), "weight": state.weight[0].item()}) + "\n")


train(state)
