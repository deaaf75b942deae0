import os
import time

import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    for state.step in range(state.step, 10):
        time.sleep(0.1)  # one step of the training
        if elastic.rank() == 1 and elastic.generation() == 1 and state.step == 5:
            os.kill(os.getpid(), 9)
        torch.distributed.all_reduce(torch.zeros(1))


train(state)
