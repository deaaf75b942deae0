"""A small GPT that learns the Python language reference. Its loss curve does not depend on the number of workers.

    elasticrun -np 4 --min-np 1 python examples/gpt.py --steps 200

The text comes with Python (``pydoc_data.topics``). The loader keeps the global batch fixed: step i trains on the same
24 pieces with 1, 3 or 5 workers. The factor ``loader.weight`` makes the averaged gradient the mean over the pieces.
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import elasticstate as elastic

GLOBAL_BATCH, LENGTH, WIDTH, LAYERS, HEADS = 24, 64, 64, 2, 4

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--losses", type=argparse.FileType("a", bufsize=1), help="each rank adds the loss of each step")
parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, as for a larger model")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


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


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
loader = elastic.ElasticDataLoader(TensorDataset(pieces), global_batch_size=GLOBAL_BATCH, drop_last=True)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, step=0)


@elastic.run
def train(state: elastic.TorchState) -> float:
    model, loss = DistributedDataParallel(state.model, init_sync=False), torch.zeros(())
    for _ in state.loader.epochs(1_000):
        for (tokens,) in state.loader:
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()) * state.loader.weight
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            time.sleep(args.pace)
            state.step += 1
            dist.all_reduce(loss.detach_())
            loss /= elastic.size()
            if args.losses:  # every rank writes the loss, because any rank may die before it writes
                args.losses.write(f"{state.step} {loss.item()!r}\n")
            state.commit()
            if state.step >= args.steps:
                return loss.item()
    return loss.item()


loss = train(state)
if elastic.rank() == 0:
    print(f"{args.steps} steps over {len(text)} characters: loss {loss:.4f}")
