"""The smallest elastic training.

    elasticrun -np 2 --min-np 1 python examples/minimal.py

Kill a worker while the job runs: the others continue, and a new worker joins. Plain ``python`` works too.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

STEPS = 500

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights = torch.arange(8.0)  # the weights that the model has to find

state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


@elastic.run
def train(state: elastic.TorchState) -> float:
    # Create objects that belong to a world in here: each new world calls this function again, from the last commit.
    model = DistributedDataParallel(state.model, init_sync=False)  # all members start equal: no broadcast needed
    loss = torch.zeros(())
    while state.step < STEPS:
        inputs = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(inputs)[:, 0], inputs @ weights)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
    return loss.item()


loss = train(state)
if elastic.rank() == 0:
    print(f"{STEPS} steps, {elastic.size()} workers, generation {elastic.generation()}: loss {loss:.6f}")
