"""Ranks with different numbers of batches, in torch's join context. Each rank has documents of its own.

    elasticrun -np 3 --min-np 2 python examples/uneven.py

A rank without batches shadows the collectives and ticks of the others. At the end of the join context all ranks have
the state of the rank that finished last. Each batch ends one tick. A new world distributes the documents again and
restarts the epoch. Use ElasticDataLoader if each sample must count exactly once in an epoch. The text comes with
Python.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import elasticstate as elastic

BATCH = 4096

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
documents = [torch.tensor(list(text.encode("ascii", "replace"))) for _, text in sorted(topics.items())]
model = nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 128))  # predicts the next character from the current one
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
state = elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)


def begin_again() -> None:
    state.batch = 0


state.register_reset_callbacks([begin_again])


@elastic.run
def train(state: elastic.TorchState) -> float:
    model, loss = DistributedDataParallel(state.model, init_sync=False), torch.zeros(())
    batches = torch.cat(documents[elastic.rank() :: elastic.size()]).split(BATCH)
    while state.epoch < args.epochs:
        with Join([model, state]):
            for batch in batches[state.batch :]:
                loss = nn.functional.cross_entropy(model(batch[:-1]), batch[1:])
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                state.batch += 1
                state.commit()
        print(f"rank {elastic.rank()}: {len(batches)} batches, of at most {state.batch}", flush=True)
        state.epoch += 1
        state.batch = 0
        state.commit()
    return loss.item()


loss = train(state)
print(f"rank {elastic.rank()}: loss {loss:.3f}")
