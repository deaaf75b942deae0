import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(4096, 4096))


@elastic.run
def train(state):
    for step in range(10):
        state.commit()


train(state)
