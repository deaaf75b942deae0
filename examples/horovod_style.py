"""The training of digits.py, written like an elastic Horovod script. Only the import differs from Horovod.

elasticrun -np 4 --min-np 2 python examples/horovod_style.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticstate.horovod as hvd  # was: import horovod.torch as hvd

BATCH, LR, BATCHES_PER_COMMIT = 16, 5e-4, 10

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)
dataset = TensorDataset(train_x, train_y)
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=LR * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.epoch < args.epochs:
        sampler.set_epoch(state.epoch)
        loss = torch.zeros(())
        for batch, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            sampler.record_batch(batch, BATCH)
            if batch % BATCHES_PER_COMMIT == 0:
                state.commit()
            else:
                state.check_host_updates()
        mean = hvd.allreduce(loss.detach()).item()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: {hvd.size()} workers, loss {mean:.3f}", flush=True)
        state.epoch += 1
        state.commit()


def on_state_reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = LR * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
if hvd.rank() == 0:
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"{args.epochs} epochs: test accuracy {accuracy:.4f}")
