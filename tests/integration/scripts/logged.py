"""A training that logs to TensorBoard, an offline run of W&B and a progress bar. Rank 0 kills itself at one step.

The losses do not depend on the size of the world. All ranks stop at the first step at which rank 0 sees the stop file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import elasticstate as elastic
from elasticstate.loggers import Log, ProgressBar, TensorBoard, WandB

TOTAL = 1000

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--steps", type=int, default=TOTAL)
parser.add_argument("--kill-at", type=int, default=0)
parser.add_argument("--pace", type=float, default=0.0)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(240, 4)
loader = elastic.ElasticDataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch_size=12)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
settings = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=0.1)
log = Log(
    TensorBoard(args.folder / "tensorboard"),
    WandB(str(args.folder / "wandb"), id="one-run", settings=settings),
    ProgressBar(TOTAL, mininterval=0),
)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, step=0, log=log)


def note(what: str) -> None:
    place = {"rank": elastic.rank(), "generation": elastic.generation(), "pid": os.getpid(), "step": state.step}
    with open(args.folder / "logs" / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"what": what, "time": time.time(), **place}) + "\n")


@elastic.run
def train(state: elastic.TorchState) -> None:
    note("enter")
    model = DistributedDataParallel(state.model, init_sync=False)
    for _ in state.loader.epochs(TOTAL):
        for x, y in state.loader:
            loss = torch.nn.functional.mse_loss(model(x), y) * state.loader.weight
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            stops = elastic.rank() == 0 and (args.folder / "stop").exists()
            sums = torch.stack([loss.detach() / elastic.size(), torch.tensor(float(stops))])
            dist.all_reduce(sums)
            time.sleep(args.pace)
            state.step += 1
            state.log(state.step, {"loss/train": sums[0]}, lr=state.optimizer.param_groups[0]["lr"])
            if state.step == args.kill_at and elastic.rank() == 0 and elastic.generation() == 1:
                note("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            state.commit(every=7)
            note("trained")
            if sums[1] or state.step == args.steps:
                state.commit()
                state.log.close()
                note("end")
                return


train(state)
