import torch

import elasticstate as elastic

data = torch.utils.data.TensorDataset(torch.randn(64, 8))
loader = torch.utils.data.DataLoader(data, batch_size=4)
state = elastic.TorchState(model=torch.nn.Linear(8, 1), loader=loader)


@elastic.run
def train(state):
    for _ in state.loader:
        state.commit()


train(state)
