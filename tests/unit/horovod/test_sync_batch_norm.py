"""SyncBatchNorm in a world of one is BatchNorm. With several ranks: integration/test_horovod_operations.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elasticstate.horovod as hvd


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_alone_it_is_batch_norm(alone: None, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mine, plain = hvd.SyncBatchNorm(3, **options), nn.BatchNorm1d(3, **options)
    for step in range(4):
        batch = torch.randn(5, 3)
        for layer in (mine, plain):
            layer.train(step != 2)
        torch.testing.assert_close(mine(batch), plain(batch))
        torch.testing.assert_close(mine.state_dict(), plain.state_dict())
