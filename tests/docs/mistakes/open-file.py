import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1), log=open("log.txt", "a"))


@elastic.run
def train(state):
    for step in range(10):
        state.log.write("a step")
        state.commit()


train(state)
