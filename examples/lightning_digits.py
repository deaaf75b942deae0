"""Handwritten digits with PyTorch Lightning, trained on the data set that scikit-learn includes.

    elasticrun -np 4 --min-np 2 --preload lightning.pytorch python examples/lightning_digits.py --epochs 20

Six lines differ from a plain Lightning script: docs/guides/lightning.md shows them. The global batch has the same size
in every world, and each epoch uses each sample once, even if the world changes in the middle of the epoch.
"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticstate.lightning

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def on_fit_end(self):
        if self.trainer.is_global_zero:
            print(f"accuracy {self.trainer.callback_metrics['accuracy']:.3f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0)
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)

model = Digits()
loader = elasticstate.ElasticDataLoader(TensorDataset(train_x, train_y), global_batch_size=64)
test_loader = DataLoader(TensorDataset(test_x, test_y), batch_size=512)


@elasticstate.run
def train(state):
    trainer = elasticstate.lightning.Trainer(state, max_epochs=args.epochs, accelerator="cpu")
    trainer.fit(model, loader, test_loader)


train(elasticstate.lightning.LightningState(model))
