import torch

import elasticstate as elastic

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@elastic.run
def train(model, optimizer):
    model.train()


train(model, optimizer)
