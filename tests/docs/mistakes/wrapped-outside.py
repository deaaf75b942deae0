import torch

import elasticstate as elastic

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
state = elastic.TorchState(model=model, step=0)


@elastic.run
def train(state):
    while state.step < 10:
        state.step += 1
        state.commit()


train(state)
