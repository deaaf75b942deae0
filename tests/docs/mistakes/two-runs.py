import torch

import elasticstate as elastic

state = elastic.TorchState(model=torch.nn.Linear(8, 1))


@elastic.run
def pretrain(state):
    state.commit()


@elastic.run
def finetune(state):
    state.commit()


pretrain(state)
finetune(state)
