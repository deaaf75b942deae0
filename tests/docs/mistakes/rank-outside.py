import torch

import elasticstate as elastic

rank = elastic.rank()
state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    while state.step < 10:
        state.step += 1
        state.commit()


train(state)
