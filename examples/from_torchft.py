"""A training with torchft's DistributedDataParallel, as elasticstate has it. docs/guides/torchft.md shows the original.

    elasticrun -np 4 --min-np 1 python examples/from_torchft.py

The loop is torchft's. The state and the decorated function are in place of the Manager and the lighthouse.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import elasticstate as elastic

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, as for a larger model")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(2048, 20)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))

model = nn.Linear(20, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = elastic.ElasticDataLoader(dataset, batch_size=32)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, step=0)


@elastic.run
def train(state: elastic.TorchState) -> float:
    model = DistributedDataParallel(state.model, init_sync=False)
    loss = torch.zeros(())
    for _ in state.loader.epochs(args.steps):  # more than there will be
        for inputs, targets in state.loader:
            state.optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            state.optimizer.step()
            time.sleep(args.pace)
            state.step += 1
            state.commit()
            if state.step % 100 == 0 and elastic.rank() == 0:
                print(f"[{state.step}] loss = {loss:.4f}, {elastic.size()} workers", flush=True)
            if state.step >= args.steps:
                return loss.item()
    return loss.item()


loss = train(state)
if elastic.rank() == 0:
    print(f"{state.step} steps: loss {loss:.4f}")
