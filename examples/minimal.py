"""The smallest elastic training.

    elasticrun -np 2 --min-np 1 python examples/minimal.py

Kill a worker while it runs: the others go on where they were, and a new one joins. Plain ``python`` works too.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

STEPS = 500

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights = torch.arange(8.0)  # what the model has to find

state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


@elastic.run
def train(state: elastic.TorchState) -> float:
    # What belongs to a world is made inside: this function begins again, from the last commit, in each new one.
    model = DistributedDataParallel(state.model, init_sync=False)  # all members start equal: nothing to broadcast
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
