import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    while state.step < 10:
        state.step += 1
        state.commit()
    weights = [None] * elastic.size()
    torch.distributed.all_gather_object(weights, state.model.weight.sum().item())
    print("all weights are equal:", len(set(weights)) == 1)


train(state)
