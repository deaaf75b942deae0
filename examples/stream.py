"""An iterable-style data set: torchdata's StatefulDataLoader as a value of the state.

    pip install torchdata
    elasticrun -np 2 --min-np 1 python examples/stream.py

The position of the data set is that of the whole world: of the next ``size()`` lines, each rank takes one. So the
position is the same on all ranks, is part of each commit, and is correct in a world of another size. The text comes
with Python.
"""

import argparse
import time
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elasticstate as elastic

BATCH, LENGTH = 32, 40

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, as for a larger model")
args = parser.parse_args()


class Lines(IterableDataset):
    """All lines of a text, each once. Leaves out the last lines if they are not enough for all ranks."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position + elastic.size() <= len(self.lines):
            line = self.lines[self.position + elastic.rank()]
            self.position += elastic.size()
            yield torch.tensor(list(line.encode("ascii", "replace")[:LENGTH].ljust(LENGTH)))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


torch.manual_seed(0)
torch.set_num_threads(1)
dataset = Lines([line.strip() for text in topics.values() for line in text.splitlines() if line.strip()])
model = nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 128))  # predicts the next character from the current one
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = StatefulDataLoader(dataset, batch_size=BATCH)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, lines=0)


@elastic.run
def train(state: elastic.TorchState) -> float:
    model, loss = DistributedDataParallel(state.model, init_sync=False), torch.zeros(())
    for lines in state.loader:
        loss = nn.functional.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        time.sleep(args.pace)
        state.lines += len(lines) * elastic.size()
        state.commit()
        if elastic.rank() == 0 and state.lines % 10 == 0:
            print(f"{state.lines} lines", flush=True)
    return loss.item()


loss = train(state)
if elastic.rank() == 0:
    print(f"{state.lines} of {len(dataset.lines)} lines: loss {loss:.3f}")
