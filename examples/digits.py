"""Handwritten digits: a small convolutional network, trained on the data set that scikit-learn includes.

    elasticrun -np 4 --min-np 2 python examples/digits.py --epochs 20

The global batch has the same size in every world, and each epoch uses each sample once, even if the world changes in
the middle of the epoch. ``make demo`` runs this script and disturbs the job.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import elasticstate as elastic

GLOBAL_BATCH = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, as for a larger model")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)
dataset = TensorDataset(train_x, train_y)

model = nn.Sequential(
    nn.Unflatten(1, (1, 8, 8)),
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = elastic.ElasticDataLoader(dataset, global_batch_size=GLOBAL_BATCH)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@elastic.run
def train(state: elastic.TorchState) -> None:
    model = DistributedDataParallel(state.model, init_sync=False)
    for epoch in state.loader.epochs(args.epochs):
        if elastic.rank() == 0 and epoch % 5 == 0:
            print(f"epoch {epoch}", flush=True)
        for inputs, targets in state.loader:
            state.optimizer.zero_grad()
            (nn.functional.cross_entropy(model(inputs), targets) * state.loader.weight).backward()
            state.optimizer.step()
            time.sleep(args.pace)
            state.commit()


train(state)
if elastic.rank() == 0:
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"{args.epochs} epochs: test accuracy {accuracy:.4f}")
