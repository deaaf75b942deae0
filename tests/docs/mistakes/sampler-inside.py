import os
import time

import torch
from torch.utils.data import DataLoader, DistributedSampler

import elasticstate as elastic

data = torch.utils.data.TensorDataset(torch.randn(64, 8))
state = elastic.TorchState(model=torch.nn.Linear(8, 1), epoch=0, batches=0)


@elastic.run
def train(state):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    while state.epoch < 2:
        sampler.set_epoch(state.epoch)
        for _ in loader:
            time.sleep(0.1)  # one step of the training
            if elastic.rank() == 1 and elastic.generation() == 1 and state.batches == 5:
                os.kill(os.getpid(), 9)
            torch.distributed.all_reduce(torch.zeros(1))
            state.batches += 1
            state.commit()
        state.epoch += 1


train(state)
