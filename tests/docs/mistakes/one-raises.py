import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    while state.step < 10:
        if elastic.rank() == 1 and elastic.generation() == 1 and state.step == 5:
            raise ValueError("bad sample")
        torch.distributed.all_reduce(torch.zeros(1))
        state.step += 1
        state.commit()
    print("trained", state.step, "steps")


train(state)
