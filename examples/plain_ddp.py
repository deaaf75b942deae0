"""A training script as in PyTorch's tutorials, for torchrun: it does not import elasticstate.

``elasticrun`` runs it unchanged. When a worker fails or the hosts change, all workers start again and load the
snapshot of the last epoch::

    elasticrun -np 2 python examples/plain_ddp.py --epochs 20
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, snapshot: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.device = next(model.parameters()).device
        self.loader = loader
        self.optimizer = optimizer
        self.snapshot = snapshot
        self.epoch = 0
        if snapshot.exists():
            loaded = torch.load(snapshot, map_location=self.device)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            self.epoch = loaded["epoch"]
        self.model = DistributedDataParallel(model)

    def train(self, epochs: int) -> None:
        while self.epoch < epochs:
            self.loader.sampler.set_epoch(self.epoch)
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(inputs.to(self.device)), targets.to(self.device))
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            if self.rank == 0:
                self.save()
            restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
            size = dist.get_world_size()
            print(f"epoch {self.epoch} rank {self.rank} of {size} restarts {restarts} loss {loss:.4f}", flush=True)

    def save(self) -> None:
        written = self.snapshot.with_suffix(".new")
        model, optimizer = self.model.module.state_dict(), self.optimizer.state_dict()
        torch.save({"model": model, "optimizer": optimizer, "epoch": self.epoch}, written)
        written.replace(self.snapshot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    inputs = torch.randn(2048, 20)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data))
    model = nn.Linear(20, 1).to(device)
    Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), args.snapshot).train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
