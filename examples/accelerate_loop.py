"""Handwritten digits in a training loop with Accelerate.

    elasticrun -np 3 --min-np 1 python examples/accelerate_loop.py

The data set comes with scikit-learn. Workers may die, join and leave: the global batch, the order of the samples and
the losses stay those of the first world. Six lines differ from a script for torchrun.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticstate.huggingface import Accelerator, run

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))


@run
def main(state):
    accelerator = Accelerator(state, cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss = torch.zeros(())
    for epoch in accelerator.epochs(options.epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            state.commit()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    with torch.no_grad():
        images, labels = dataset.tensors
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    accelerator.print(f"{options.epochs} epochs: training accuracy {accuracy:.4f}")


main()
