"""Gradients that accumulate over a tick."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elasticstate import TorchState
from elasticstate.state import step_check
from elasticstate.state.base import committer_of
from elasticstate.state.step_check import StepCheck
from tests.kit.state import Member, World

STEPS = 4


@pytest.fixture(autouse=True)
def _warns_anew() -> None:
    step_check._warn_of_gradients.cache_clear()


def after_each_batch(batch: Callable[[], object], step: Callable[[], object], commit: Callable[[], object]) -> None:
    for number in range(2 * STEPS):
        batch()
        if number % 2:
            step()
        commit()


def after_each_step(batch: Callable[[], object], step: Callable[[], object], commit: Callable[[], object]) -> None:
    for _ in range(STEPS):
        batch()
        batch()
        step()
        commit()


def between_batches_and_step(
    batch: Callable[[], object], step: Callable[[], object], commit: Callable[[], object]
) -> None:
    for _ in range(STEPS):
        batch()
        commit()
        batch()
        step()


def with_skipped_steps(batch: Callable[[], object], step: Callable[[], object], commit: Callable[[], object]) -> None:
    for number in range(2 * STEPS):
        batch()
        step() if number % 2 == 0 else None
        commit()


CASES = [
    (after_each_batch, "after", True, True),
    (after_each_batch, "after", False, True),
    (between_batches_and_step, "after", True, True),
    (after_each_step, "after", True, False),
    (after_each_step, "after", False, False),
    (after_each_step, "before", True, False),
    (with_skipped_steps, "before", True, False),
]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("loop", "zero", "to_none", "warns"), CASES)
def test_only_gradients_from_before_a_tick_are_a_warning(
    loop: Callable[..., None], zero: str, to_none: bool, warns: bool, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``zero``: gradients are set to zero after each step, or before each batch."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model=model, optimizer=optimizer)
    committer_of(state).use_session(Member(World(2)))

    def batch() -> None:
        if zero == "before" and loop is not after_each_step:
            optimizer.zero_grad(to_none)
        loss: Any = model(torch.ones(1, 2)).sum()
        loss.backward()

    def step() -> None:
        optimizer.step()
        if zero == "after" or loop is after_each_step:
            optimizer.zero_grad(to_none)

    with caplog.at_level(logging.WARNING, "elasticstate"), StepCheck(state, lambda: None):
        loop(batch, step, lambda: state.commit(every=every))
    assert caplog.text.count("a step uses gradients from before the last commit()") == warns
