"""A small GPT whose parameters and optimizer are sharded by FSDP2, in worlds of any size.

    elasticrun -np 4 --min-np 1 python examples/fsdp.py --steps 200

``state.attach`` names what belongs to one world. In the first world ``init`` draws the weights; each later one takes
its shards from the commits of the one before. No rank ever holds a whole tensor. The global batch stays the same.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elasticstate as elastic

GLOBAL_BATCH, LENGTH, WIDTH, LAYERS, HEADS = 24, 64, 64, 2, 4

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()
text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        form = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **form) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x.flatten(0, 1))

    def init_weights(self) -> None:
        torch.manual_seed(elastic.rank())  # each rank draws its own shards
        for name, parameter in self.named_parameters():
            mean, std = float("norm" in name and "weight" in name), 0.02 * ("norm" not in name and "bias" not in name)
            nn.init.normal_(parameter.detach().to_local(), mean, std)


loader = elastic.ElasticDataLoader(TensorDataset(pieces), global_batch_size=GLOBAL_BATCH, drop_last=True)
state = elastic.TorchState(loader=loader, step=0)


@elastic.run
def train(state: elastic.TorchState) -> None:
    mesh = init_device_mesh(elastic.device().type, (elastic.size(),))
    with torch.device("meta"):
        model = GPT()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device=elastic.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    state.attach(model=model, optimizer=optimizer, init=model.init_weights)
    for (tokens,) in (batch for _ in state.loader.epochs(1_000) for batch in state.loader):
        tokens = tokens.to(elastic.device())
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss * state.loader.weight).backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step % 20 == 0 and elastic.rank() == 0:
            print(f"step {state.step}: loss {loss.item():.4f} on {elastic.size()} workers", flush=True)
        if state.step >= args.steps:
            break


train(state)
