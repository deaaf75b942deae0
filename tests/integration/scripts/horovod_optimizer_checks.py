"""Checks of DistributedOptimizer on three ranks; see horovod_checks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elasticstate.horovod as hvd


def check_every_optimizer_of_torch() -> None:
    """Compare each optimizer with the plain one that gets the mean of all gradients. The newest ones are included."""
    known: dict[str, Callable[..., Any]] = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert {"Adafactor", "Adam", "LBFGS", "SGD"} <= set(known)
    for name, kind in known.items():
        if name in ("LBFGS", "SparseAdam"):  # see check_closures and check_sparse_adam
            continue
        weights = [nn.Parameter(torch.arange(6.0).view(2, 3) / 4) for _ in range(2)]  # Muon takes matrices only
        plain = kind([weights[0]], lr=0.05)
        distributed = hvd.DistributedOptimizer(kind([weights[1]], lr=0.05), [("weight", weights[1])])
        for step in range(4):
            own = torch.cos(torch.arange(6.0).view(2, 3) + hvd.rank() + step)
            weights[0].grad = hvd.allreduce(own)
            plain.step()
            distributed.zero_grad()
            (weights[1] * own).sum().backward()
            distributed.step()
            torch.testing.assert_close(weights[1], weights[0], msg=name)


def check_sum() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    (weight * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert weight.tolist() == [-6, -6]


def check_gradients_are_sent_during_backward_once_all_ranks_agree_on_them() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for step in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        assert optimizer._reducer._launched == (1 if step > 0 else 0)
        optimizer.step()
    assert weight.tolist() == [-3, -3]


def check_a_rank_without_a_backward_pass() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    if hvd.rank() == 1:
        (weight * 3).sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1, -1]


def check_clipping_before_the_step() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    for skipping in (True, False):
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_value_([weight], 1.0)
        if skipping:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    assert weight.tolist() == [-2, -2]


def check_what_comes_later_is_reduced() -> None:
    """Check a parameter that was frozen at first, and a parameter group that is added later."""
    frozen, later = nn.Parameter(torch.zeros(2), requires_grad=False), nn.Parameter(torch.zeros(2))
    weight = nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([frozen, weight], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        ((weight + frozen + later) * hvd.rank()).sum().backward()
        optimizer.step()
        frozen.requires_grad = True
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [later]})
    assert weight.tolist() == [-3, -3]
    assert frozen.tolist() == later.tolist() == [-2, -2]


def check_closures() -> None:
    weight = nn.Parameter(torch.tensor([float(1 + hvd.rank())]))
    hvd.broadcast_parameters([("weight", weight)], root_rank=2)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.LBFGS([weight], max_iter=5))
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (weight - hvd.rank()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls > 1
    assert weight.item() == pytest.approx(1.0, abs=1e-4)
