"""A small GPT whose parameters and optimizer are sharded by FSDP2. It survives lost hosts, and worlds of any size.

    elasticrun -np 4 --min-np 1 python examples/fsdp.py --steps 200

The text comes with Python (``pydoc_data.topics``). ``state.attach`` names what belongs to one world: in the first world
``init`` draws the weights, and each later world takes its shards from the commits of the one before. No rank ever holds
a whole tensor. The loader keeps the global batch fixed, so the loss curve does not depend on the number of workers.
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elasticstate as elastic

GLOBAL_BATCH, LENGTH, WIDTH, LAYERS, HEADS = 24, 64, 64, 2, 4

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--losses", type=argparse.FileType("a", bufsize=1), help="each rank adds the loss of each step")
parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, as for a larger model")
args = parser.parse_args()

torch.set_num_threads(1)
text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **block) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)

    def init_weights(self) -> None:
        """Draw this rank's shards."""
        torch.manual_seed(elastic.rank())
        for name, parameter in self.named_parameters():
            shard = parameter.detach().to_local()
            if name.endswith("bias"):
                nn.init.zeros_(shard)
            elif "norm" in name:
                nn.init.ones_(shard)
            else:
                nn.init.normal_(shard, std=0.02)


loader = elastic.ElasticDataLoader(TensorDataset(pieces), global_batch_size=GLOBAL_BATCH, drop_last=True)
state = elastic.TorchState(loader=loader, step=0)


@elastic.run
def train(state: elastic.TorchState) -> float:
    device = elastic.device()
    mesh = init_device_mesh(device.type, (elastic.size(),))
    with torch.device("meta"):
        model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    state.attach(model=model, optimizer=optimizer, init=model.init_weights)
    loss = torch.zeros(())
    for _ in state.loader.epochs(1_000):
        for (tokens,) in state.loader:
            tokens = tokens.to(device)
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()) * state.loader.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
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
