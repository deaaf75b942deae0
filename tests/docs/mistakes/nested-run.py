import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1))


@elastic.run
def train_epoch(state):
    state.commit()


@elastic.run
def train(state):
    for epoch in range(3):
        train_epoch(state)


train(state)
