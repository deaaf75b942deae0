import torch

import elasticstate as elastic

model = torch.nn.Linear(8, 1)
state = elastic.TorchState()


@elastic.run
def train(state):
    for step in range(10):
        state.commit()


train(state)
