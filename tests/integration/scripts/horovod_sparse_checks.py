"""Checks of DistributedOptimizer with sparse gradients, on three ranks; see horovod_checks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import elasticstate.horovod as hvd


def check_embeddings_with_sparse_gradients() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=3.0), sparse_as_dense=True)
    table(torch.tensor([hvd.rank(), 5])).sum().backward()
    optimizer.step()
    assert table.weight[:, 0].tolist() == [-1, -1, -1, 0, 0, -3]


def check_sparse_gradients_stay_sparse() -> None:
    """Compare with dense gradients. Rank 0 does not use the second table in some steps."""

    def make(sparse: bool) -> nn.ModuleList:
        torch.manual_seed(3)
        return nn.ModuleList([nn.Embedding(6, 2, sparse=sparse), nn.Embedding(6, 2, sparse=sparse), nn.Linear(2, 1)])

    models = make(sparse=True), make(sparse=False)
    optimizers: list[Any] = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    for step in range(4):
        rows = torch.tensor([hvd.rank(), 5, (hvd.rank() + step) % 6])
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            hidden = model[0](rows)
            if step % 2 == 0 or hvd.rank() > 0:
                hidden = hidden + model[1](rows)
            model[2](hidden).square().sum().backward()
            optimizer.synchronize()
        gradients = [[parameter.grad for parameter in model.parameters()] for model in models]
        assert [gradient.is_sparse for gradient in gradients[0]] == [True, True, False, False]
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found.to_dense(), expected)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def check_sparse_adam() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    nn.init.ones_(table.weight)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.5), op=hvd.Sum)
    table(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(table.weight.detach()[:, 0], torch.tensor([0.5, 0.5, 0.5, 1, 1, 1]))
