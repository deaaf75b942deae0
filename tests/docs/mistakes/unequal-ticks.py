import time

import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1))


@elastic.run
def train(state):
    for step in range(400):
        time.sleep(0.1)  # one step of the training
        torch.distributed.all_reduce(torch.zeros(1))
        if elastic.rank() == 0:
            state.commit()


train(state)
