import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    while state.stpe < 10:
        state.step += 1
        state.commit()


train(state)
