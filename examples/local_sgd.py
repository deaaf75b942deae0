"""A small GPT that learns the Python language reference with DiLoCo: the workers exchange 1/20 of DDP's bytes.

    elasticrun -np 3 --min-np 1 python examples/local_sgd.py --steps 400

Each worker makes 20 steps alone, then an outer step moves all of them. The text comes with Python
(``pydoc_data.topics``); the last tenth is for the evaluation.
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elasticstate as elastic
from elasticstate.local_sgd import DiLoCo, LocalSGD

BATCH, LENGTH, WIDTH, LAYERS, HEADS = 8, 64, 64, 2, 4

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--method", choices=["diloco", "local-sgd"], default="diloco")
parser.add_argument("--steps", type=int, default=400, help="inner steps of each worker")
parser.add_argument("--every", type=int, default=20, help="inner steps between two outer steps")
parser.add_argument("--fragments", type=int, default=1, help="parts of the model with outer steps of their own")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, as for a larger model")
args = parser.parse_args()

torch.manual_seed(args.seed)
torch.set_num_threads(1)
text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
training, evaluation = pieces[: len(pieces) * 9 // 10], pieces[len(pieces) * 9 // 10 :]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH - 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.layers(x, self.mask, is_causal=True))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = elastic.ElasticDataLoader(TensorDataset(training), batch_size=BATCH, drop_last=True, seed=args.seed)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, step=0)
if args.method == "diloco":
    outer = DiLoCo(state, every=args.every, fragments=args.fragments)
else:
    outer = LocalSGD(state, every=args.every)


def train_steps(state: elastic.TorchState) -> None:
    for _ in state.loader.epochs(1_000):
        for (tokens,) in state.loader:
            if state.step >= args.steps:
                return
            state.optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()  # without DistributedDataParallel
            state.optimizer.step()
            time.sleep(args.pace)
            state.step += 1
            outer.step(samples=len(tokens))  # instead of state.commit()
            if state.step % 50 == 0 and elastic.rank() == 0:
                print(f"step {state.step}: loss {loss.item():.4f}, {elastic.size()} workers", flush=True)


@elastic.run
def train(state: elastic.TorchState) -> float:
    train_steps(state)
    outer.outer_step()  # all workers have the same model now
    with torch.no_grad():
        return loss_of(model, evaluation).item()


loss = train(state)
if elastic.rank() == 0:
    print(f"{args.steps} steps over {training.numel()} characters: evaluation loss {loss:.4f}")
