import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    while state.step < 10:
        if elastic.rank() == 0 and state.step == 5:
            torch.distributed.barrier()
        torch.distributed.all_reduce(torch.zeros(1))
        state.step += 1
        state.commit()


train(state)
