"""One's own kind of state: k-means, without a module or an optimizer.

    elasticrun -np 2 --min-np 1 python examples/custom_state.py

``capture`` and ``apply`` are all that a state has to say: commit, restore and sync follow from the two.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import elasticstate as elastic

BATCHES, CLUSTERS = 200, 4


class KMeans(elastic.State):
    """Centres, the number of points that each has drawn so far, and how many batches have been seen."""

    def __init__(self, centres: torch.Tensor) -> None:
        super().__init__(centres=centres, counts=torch.zeros(len(centres)), batch=0)

    def capture(self) -> dict[str, Any]:
        return {"centres": self.centres, "counts": self.counts, "batch": self.batch}

    def apply(self, values: Mapping[str, Any]) -> None:
        # Tensors are the commit's own: copy them, or the next step would write into the commit.
        self.centres.copy_(values["centres"])
        self.counts.copy_(values["counts"])
        self.batch = values["batch"]


torch.manual_seed(0)
corners = torch.tensor([[4.0, 4.0], [4.0, -4.0], [-4.0, 4.0], [-4.0, -4.0]])
state = KMeans(centres=corners * 0.1)


@elastic.run
def train(state: KMeans) -> None:
    while state.batch < BATCHES:
        # Each rank draws points of its own: a newcomer's random state is derived, not copied.
        points = corners[torch.randint(CLUSTERS, (64,))] + torch.randn(64, 2)
        nearest = torch.nn.functional.one_hot(torch.cdist(points, state.centres).argmin(1), CLUSTERS).float()
        # Sums and counts of all ranks' points in one message.
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
