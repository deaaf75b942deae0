import torch

import elasticstate as elastic

torch.distributed.init_process_group("gloo")
state = elastic.TorchState(model=torch.nn.Linear(8, 1), step=0)


@elastic.run
def train(state):
    while state.step < 10:
        state.step += 1
        state.commit()


train(state)
