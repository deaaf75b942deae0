"""Batch norms under DistributedDataParallel: running statistics differ by rank. A worker dies in the middle."""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

STEPS, DEATH = 6, 3

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


def values(tensor: torch.Tensor) -> set[tuple[float, ...]]:
    rows = [torch.empty_like(tensor) for _ in range(elastic.size())]
    dist.all_gather(rows, tensor.detach())
    return {tuple(row.flatten().tolist()) for row in rows}


@elastic.run
def train(state: elastic.TorchState) -> None:
    if state.step:
        weights, means = values(state.model[0].weight), values(state.model[1].running_mean)
        print(f"generation {elastic.generation()}: {len(weights)} weights, {len(means)} running means", flush=True)
    model = DistributedDataParallel(state.model, init_sync=False)
    while state.step < STEPS:
        state.optimizer.zero_grad()
        model(torch.randn(8, 4) + elastic.rank()).square().mean().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
        if state.step == DEATH and elastic.generation() == 1:
            dist.barrier()  # all ranks have committed
            if elastic.rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)


train(state)
