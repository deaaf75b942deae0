"""Collectives after the training, in the last world; see test_horovod_after.py.

The lines of ``<log>/<pid>.jsonl`` are ``{"what": ..., "rank": r, ...}``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

import elasticstate
import elasticstate.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--dies-at", type=int, default=-1, help="rank 1 of the first world kills itself in this step")
parser.add_argument("--dies-after", action="store_true", help="rank 1 kills itself after the training")
parser.add_argument("--exits-last", type=Path, help="rank 0 ends when this file exists")
parser.add_argument("--inelastic", action="store_true")
args = parser.parse_args()
log = open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    log.write(json.dumps({"what": what, "time": time.time(), "pid": os.getpid(), "rank": hvd.rank(), **fields}) + "\n")


class Noted(hvd.elastic.TorchState):
    """A state that notes each planned change of the world."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        note("hosts", timestamp=timestamp, update_res=update_res)


def train(state: Noted) -> int:
    while state.step < 8:
        if state.step == args.dies_at and elasticstate.generation() == 1 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += hvd.allreduce(torch.ones(2), op=hvd.Sum)
        state.step += 1
        state.commit()
    return int(state.step)


def check_metric() -> None:
    """Average a metric, as most scripts of Horovod do at their end."""
    mean = hvd.allreduce(torch.tensor([float(hvd.rank())]), name="metric")
    assert mean.item() == sum(range(hvd.size())) / hvd.size()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * (1.0 + hvd.rank())).sum().backward()
    optimizer.step()
    assert weight.tolist() == [1 - (1 + (hvd.size() - 1) / 2)] * 2


def check_process_set() -> None:
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2


@hvd.elastic.run
def fine_tune(state: Noted, begins_at: int) -> str:
    """Train in the last world. The state begins as that of rank 0."""
    assert state.step == begins_at
    assert len({tuple(row) for row in hvd.allgather_object(state.total.tolist())}) == 1
    for _ in range(3):
        state.total += hvd.allreduce(torch.ones(2), op=hvd.Sum)
        state.step += 1
        state.commit()
    state.total.zero_()
    state.restore()
    assert state.step == begins_at + 3
    assert state.total.min() >= 3
    return "tuned"


def check_again() -> None:
    check_metric()
    hvd.shutdown()
    hvd.init()
    check_metric()
    hvd.barrier()


hvd.init()
if args.inelastic:
    check_metric()
    hvd.shutdown()
    hvd.init()
else:
    state = Noted(step=0, total=torch.zeros(2))
    assert hvd.elastic.run(train)(state) == 8
    note("trained", generation=elasticstate.generation(), size=hvd.size())
    if args.dies_after:
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.allreduce(torch.ones(1))
        except hvd.HorovodInternalError as error:
            note("failed", error=str(error))
            raise
    check_metric()
    check_gradients()
    check_process_set()
    assert fine_tune(state, 8) == "tuned"
    other = Noted(step=hvd.rank(), total=torch.full((2,), float(hvd.rank())))
    assert fine_tune(other, 0) == "tuned"
check_again()
note("last")
if args.exits_last is not None and hvd.rank() == 0:
    while not args.exits_last.exists():
        time.sleep(0.01)
    note("alone")
