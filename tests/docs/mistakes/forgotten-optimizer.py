import torch

import elasticstate as elastic

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
state = elastic.TorchState(model=model, step=0)


@elastic.run
def train(state):
    while state.step < 10:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()


train(state)
