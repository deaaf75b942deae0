import os
import time

import torch

import elasticstate as elastic

rank = int(os.environ["RANK"])
state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    while state.step < 20:
        time.sleep(0.5)  # one step of the training
        if elastic.rank() == 1 and state.step == 3:
            os.kill(os.getpid(), 9)
        state.step += 1
        state.commit()


train(state)
