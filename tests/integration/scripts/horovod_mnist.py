"""Ten classes of random images, in the structure of Horovod's elastic MNIST example: its calls of hvd in its order.

Each rank makes its loader once, as in the example. A batch is ``--batch-size / hvd.size()``, so that loaders made in
worlds of different sizes have equally many batches. With a constant batch size, as in the example, a rank that joins a
larger world ends its last epoch first, and the others wait for its gradients without end.

The lines of ``<log>/<pid>.jsonl`` are::

    {"what": "enter" | "commit" | "epoch" | "tested" | "final", "generation": g, "rank": r, "step": s, "digest": d, ...}

``step`` counts the batches trained, in a buffer of the model: ``batch`` begins at 0 after a reset, as in the example.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elasticstate
import elasticstate.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=120, help="samples of all ranks together")
parser.add_argument("--test-batch-size", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=1_000_000)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--stop", type=Path, required=True, help="train until an epoch ends while this file exists")
parser.add_argument("--batch-seconds", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)

labels, random = torch.arange(1800) % 10, torch.Generator().manual_seed(1)
images = torch.randn(10, 64, generator=random)[labels] + 2 * torch.randn(1800, 64, generator=random)
train_dataset, test_dataset = TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=args.batch_size // hvd.size(), sampler=train_sampler)
test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test_dataset, batch_size=args.test_batch_size, sampler=test_sampler)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.fc1(self.norm(x))), 0.1, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


model = Net()
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
log = open(args.log / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - open until the process ends


def note(what: str, **fields: object) -> None:
    tensors = [*model.parameters(), *(v for entry in optimizer.state.values() for v in entry.values())]
    line = {"what": what, "time": time.time(), "pid": os.getpid(), "generation": elasticstate.generation()}
    line |= {"rank": hvd.rank(), "size": hvd.size(), "lr": optimizer.param_groups[0]["lr"]}
    line |= {"step": int(model.norm.num_batches_tracked), "epoch": state.epoch, "batch": state.batch}
    line["digest"] = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
    log.write(json.dumps({**line, **fields}) + "\n")


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    note("enter")
    for state.epoch in range(state.epoch, args.epochs + 1):  # noqa: B020 - as in Horovod's example
        state.model.train()
        train_sampler.set_epoch(state.epoch)
        steps_remaining = len(train_loader) - state.batch
        for state.batch, (data, target) in enumerate(train_loader):
            if state.batch >= steps_remaining:
                break
            state.optimizer.zero_grad()
            loss = F.nll_loss(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            time.sleep(args.batch_seconds)
            if state.batch % args.log_interval == 0:
                print(f"epoch {state.epoch}, batch {state.batch} of {len(train_loader)}: loss {loss.item():.6f}")
            state.commit()
            note("commit")
        state.batch = 0
        note("epoch", loss=loss.item())
        if hvd.broadcast_object(args.stop.exists(), root_rank=0):
            break


def test() -> None:
    model.eval()
    test_loss, test_accuracy = 0.0, 0.0
    for data, target in test_loader:
        output = model(data)
        test_loss += F.nll_loss(output, target, reduction="sum").item()
        test_accuracy += output.argmax(1).eq(target).float().sum().item()
    own = [test_loss / len(test_sampler), test_accuracy / len(test_sampler)]
    average = [metric_average(own[0], "avg_loss"), metric_average(own[1], "avg_accuracy")]
    if hvd.rank() == 0:
        print(f"test set: average loss {average[0]:.4f}, accuracy {100 * average[1]:.2f} %")
    note("tested", own=own, average=average)


optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)


def on_state_reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
test()
note("final")
