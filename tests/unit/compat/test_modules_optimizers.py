from __future__ import annotations

import logging

import pytest
import torch

from elasticstate import compat
from elasticstate.compat.modules import forget_unscaled


def scaled() -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    scaler = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    scaler.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    return scaler, optimizer


def test_a_scaler_that_forgets_can_unscale_again() -> None:
    scaler, optimizer = scaled()
    scale = scaler.get_scale()
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    forget_unscaled(scaler)
    scaler.unscale_(optimizer)
    assert scaler.get_scale() == scale


def test_a_changed_scaler_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    scaler, _ = scaled()
    del scaler._per_optimizer_states
    compat.warn_absent.cache_clear()
    with caplog.at_level(logging.WARNING, "elasticstate"):
        forget_unscaled(scaler)
        forget_unscaled(scaler)
    compat.warn_absent.cache_clear()
    (record,) = caplog.records
    assert "unscale_() may fail" in record.getMessage()
