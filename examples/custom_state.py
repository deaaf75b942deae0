"""A state class for other training than torch modules and optimizers: k-means clustering.

    elasticrun -np 2 --min-np 1 python examples/custom_state.py

A state class defines ``capture`` and ``apply``. Commit, restore and sync need no more than these two.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import elasticstate as elastic

BATCHES, CLUSTERS = 200, 4


class KMeans(elastic.State):
    """State of a k-means training: the centres, the number of points of each, and the number of batches so far."""

    def __init__(self, centres: torch.Tensor) -> None:
        super().__init__(centres=centres, counts=torch.zeros(len(centres)), batch=0)

    def capture(self) -> dict[str, Any]:
        return {"centres": self.centres, "counts": self.counts, "batch": self.batch}

    def apply(self, values: Mapping[str, Any]) -> None:
        # The tensors belong to the commit. Copy them, or the next step would write into the commit.
        self.centres.copy_(values["centres"])
        self.counts.copy_(values["counts"])
        self.batch = values["batch"]


torch.manual_seed(0)
corners = torch.tensor([[4.0, 4.0], [4.0, -4.0], [-4.0, 4.0], [-4.0, -4.0]])
state = KMeans(centres=corners * 0.1)


@elastic.run
def train(state: KMeans) -> None:
    while state.batch < BATCHES:
        # Each rank draws different points: elasticstate derives the random state of a newcomer, it does not copy one.
        points = corners[torch.randint(CLUSTERS, (64,))] + torch.randn(64, 2)
        nearest = torch.nn.functional.one_hot(torch.cdist(points, state.centres).argmin(1), CLUSTERS).float()
        # One all-reduce for the sums and the counts of all ranks.
        totals = torch.cat([nearest.T @ points, nearest.sum(0)[:, None]], dim=1)
        dist.all_reduce(totals)
        sums, counts = totals[:, :2], totals[:, 2]
        state.counts += counts
        state.centres += (sums - counts[:, None] * state.centres) / state.counts.clamp(min=1)[:, None]
        state.batch += 1
        state.commit()


train(state)
if elastic.rank() == 0:
    error = (state.centres - corners).norm(dim=1).max().item()
    print(f"{int(state.counts.sum())} points: the centres are within {error:.3f} of the truth")
