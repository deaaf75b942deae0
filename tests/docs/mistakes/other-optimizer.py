import torch

import elasticstate as elastic

first = torch.nn.Linear(8, 1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(first.parameters())
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


@elastic.run
def train(state):
    while state.step < 10:
        state.model(torch.ones(4, 8)).square().mean().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()


train(state)
