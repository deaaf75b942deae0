"""Ten classes of random images, in the structure of Horovod's elastic ImageNet example: its calls of hvd in its order.

The validation set of a rank is one batch, so that ranks that began in worlds of different sizes make the same calls.
With ``--broadcast-epoch``, rank 0 broadcasts the epoch of the newest checkpoint: a collective before ``full_train``,
which is an error in a rank that joins later. For the lines of ``<log>/<pid>.jsonl`` see horovod_mnist.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elasticstate
import elasticstate.horovod as hvd

EPOCHS, BATCH, BASE_LR, WARMUP_EPOCHS, BATCH_SECONDS = 1000, 16, 0.01, 5, 0.01
BATCHES_PER_ALLREDUCE, BATCHES_PER_COMMIT, BATCHES_PER_HOST_CHECK = 2, 4, 2

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", required=True)
parser.add_argument("--broadcast-epoch", action="store_true")
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True, help="train until an epoch ends while this file exists")
args = parser.parse_args()


def note(what: str, **fields: object) -> None:
    line = {"what": what, "time": time.time(), "pid": os.getpid(), "generation": elasticstate.generation()}
    line |= {"rank": hvd.rank(), "size": hvd.size(), "lr": optimizer.param_groups[0]["lr"]}
    line |= {"step": int(model[0].num_batches_tracked), "epoch": state.epoch, "batch": state.batch}
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    log.write(json.dumps({**line, "digest": hashlib.sha256(weights).hexdigest(), **fields}) + "\n")


def train(state: hvd.elastic.TorchState) -> None:
    state.model.train()
    train_loss, train_accuracy, batch_offset = Metric("train_loss"), Metric("train_accuracy"), state.batch
    for idx, (data, target) in enumerate(train_loader):
        state.batch = batch_offset + idx
        if state.batch % BATCHES_PER_COMMIT == 0:
            state.commit()
            note("commit")
        elif state.batch % BATCHES_PER_HOST_CHECK == 0:
            state.check_host_updates()
        adjust_learning_rate(state.epoch, idx)
        optimizer.zero_grad()
        for i in range(0, len(data), BATCH):
            output, wanted = state.model(data[i : i + BATCH]), target[i : i + BATCH]
            train_accuracy.update(output.argmax(1).eq(wanted).float().mean())
            loss = F.cross_entropy(output, wanted)
            train_loss.update(loss)
            loss.div_(math.ceil(len(data) / BATCH))
            loss.backward()
        state.train_sampler.record_batch(idx, BATCH * BATCHES_PER_ALLREDUCE)
        optimizer.step()
        time.sleep(BATCH_SECONDS)
    note("epoch", loss=train_loss.average, idx=idx, batches=len(train_loader))


def validate(epoch: int) -> None:
    model.eval()
    val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            output = model(data)
            val_loss.update(F.cross_entropy(output, target))
            val_accuracy.update(output.argmax(1).eq(target).float().mean())
    note("tested", own=[val_loss.own, val_accuracy.own], average=[val_loss.average, val_accuracy.average])


def adjust_learning_rate(epoch: float, batch_idx: int) -> None:
    factor = 1.0
    if epoch < WARMUP_EPOCHS:
        epoch += (batch_idx + 1) / len(train_loader)
        factor = 1 / hvd.size() * (epoch * (hvd.size() - 1) / WARMUP_EPOCHS + 1)
    for group in optimizer.param_groups:
        group["lr"] = BASE_LR * hvd.size() * BATCHES_PER_ALLREDUCE * factor


def save_checkpoint(path: str) -> None:
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        note("saved", path=path)


class Metric:
    def __init__(self, name: str) -> None:
        self.name, self.averages = name, []

    def update(self, value: torch.Tensor) -> None:
        self.own = value.item()
        self.averages.append(hvd.allreduce(value.detach().cpu(), name=self.name).item())
        self.average = sum(self.averages) / len(self.averages)


@hvd.elastic.run
def full_train(state: hvd.elastic.TorchState) -> None:
    note("enter")
    while state.epoch < EPOCHS:
        train(state)
        validate(state.epoch)
        save_checkpoint(checkpoints[state.epoch + 1])
        state.epoch, state.batch = state.epoch + 1, 0
        state.train_sampler.set_epoch(state.epoch)
        state.commit()
        note("commit")
        if hvd.broadcast_object(args.stop.exists(), root_rank=0):
            break


hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
checkpoints = [args.checkpoint_format.format(epoch=epoch) for epoch in range(EPOCHS + 1)]
resume_from_epoch = max((epoch for epoch, path in enumerate(checkpoints) if os.path.exists(path)), default=0)
if args.broadcast_epoch:
    resume_from_epoch = int(hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"))
log = open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends
labels, random = torch.arange(1800) % 10, torch.Generator().manual_seed(1)
images = torch.randn(10, 64, generator=random)[labels] + 2 * torch.randn(1800, 64, generator=random)
train_dataset, val_dataset = TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = DataLoader(train_dataset, batch_size=BATCH * BATCHES_PER_ALLREDUCE, sampler=train_sampler)
val_sampler = DistributedSampler(val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
val_loader = DataLoader(val_dataset, batch_size=1000, sampler=val_sampler)
model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = hvd.DistributedOptimizer(
    optim.SGD(model.parameters(), lr=BASE_LR * BATCHES_PER_ALLREDUCE * hvd.size(), momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    backward_passes_per_step=BATCHES_PER_ALLREDUCE,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(checkpoints[resume_from_epoch])
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
state = hvd.elastic.TorchState(model, optimizer, train_sampler=train_sampler, epoch=resume_from_epoch, batch=0)
full_train(state)
note("final")
