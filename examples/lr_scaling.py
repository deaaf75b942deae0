"""A learning rate that follows the size of the world.

    elasticrun -np 4 --min-np 1 python examples/lr_scaling.py

Each worker takes a batch of its own, so the global batch grows with the world. The learning rate grows with it: the
linear scaling rule, after a warm-up, of Goyal et al., 2017 (https://arxiv.org/abs/1706.02677).
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

STEPS, BASE_LR, WARMUP_STEPS = 500, 0.02, 50

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=BASE_LR)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


def scale_learning_rate() -> None:
    """Set the rate for this step and this world from the base rate. Factors on the old rate would add up."""
    warmup = min(1.0, (state.step + 1) / WARMUP_STEPS)
    for group in state.optimizer.param_groups:
        group["lr"] = BASE_LR * elastic.size() * warmup


def report() -> None:
    if elastic.rank() == 0:
        rate = state.optimizer.param_groups[0]["lr"]
        print(f"step {state.step}: {elastic.size()} workers, learning rate {rate:.3f}", flush=True)


# elasticstate calls this in each new world, before newcomers receive the state. So newcomers get this rate as well.
state.register_reset_callbacks([scale_learning_rate, report])


@elastic.run
def train(state: elastic.TorchState) -> float:
    model = DistributedDataParallel(state.model, init_sync=False)
    loss = torch.zeros(())
    while state.step < STEPS:
        if state.step < WARMUP_STEPS:
            scale_learning_rate()
        inputs = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(inputs)[:, 0], inputs[:, 0].sin())
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
    return loss.item()


loss = train(state)
if elastic.rank() == 0:
    print(f"{STEPS} steps: loss {loss:.4f}, learning rate {optimizer.param_groups[0]['lr']:.3f}")
