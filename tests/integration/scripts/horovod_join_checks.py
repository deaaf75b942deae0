"""Checks of Horovod's join() on three ranks, without elastic.run. Called by horovod_checks.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import elasticstate.horovod as hvd
from elasticstate import UsageError


def check_join() -> None:
    """Join with 2, 4 and 3 batches, and gradients of 1, 2 and 3. A rank without batches counts as zeros."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for epoch in range(2):
        for batch_index in range((2, 4, 3)[hvd.rank()]):
            optimizer.zero_grad()
            (weight * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
            assert hvd.allreduce(torch.tensor(batch_index), op=hvd.Max) == batch_index
            assert hvd.allreduce(torch.tensor(batch_index + 2), op=hvd.Min) == batch_index + 2
            assert hvd.allreduce(torch.tensor(2.0), op=hvd.Product) == 2 ** ((3, 3, 2, 1)[batch_index])
            assert hvd.allreduce(torch.tensor(3.0)) == (3, 3, 2, 1)[batch_index]
            hvd.barrier()
        assert hvd.join() == 1
        if hvd.rank() == 1:
            torch.testing.assert_close(weight.detach(), torch.full((3,), -(epoch + 1) * (2 + 2 + 5 / 3 + 2 / 3)))
        hvd.broadcast_parameters({"weight": weight}, root_rank=1)


def check_calls_that_take_all_ranks_raise_while_one_has_joined() -> None:
    one = torch.ones(3)
    calls: list[Callable[[], object]] = [
        lambda: hvd.allgather(one),
        lambda: hvd.broadcast(one, 0),
        lambda: hvd.alltoall(one),
        lambda: hvd.reducescatter(one),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.broadcast_parameters({"one": one}),
    ]
    for joined in range(3):
        if hvd.rank() != joined:
            for call in calls:
                with pytest.raises(RuntimeError, match=r"join\(\)") as caught:
                    call()
                assert isinstance(caught.value, UsageError)
        last = hvd.join()
        assert last == (1 if joined == 2 else 2)
        assert hvd.allgather_object(last) == [last] * 3, "the rank in join() stays there"
