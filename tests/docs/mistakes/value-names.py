import torch

import elasticstate as elastic

values = {"model": torch.nn.Linear(8, 1)}
if elastic.local_rank() > 0:
    values["best_loss"] = 1.0
state = elastic.TorchState(**values)


@elastic.run
def train(state):
    for step in range(10):
        state.commit()


train(state)
