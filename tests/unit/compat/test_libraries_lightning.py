"""The private names of Lightning exist. unit/lightning/test_trainer_resume.py shows that they have their meaning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elasticstate import compat
from elasticstate.compat import libraries

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
environments = pytest.importorskip("lightning.fabric.plugins.environments")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    compat.warn_absent.cache_clear()
    with caplog.at_level(logging.WARNING, "elasticstate"):
        yield caplog
    compat.warn_absent.cache_clear()


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_the_names_are_those_of_the_installed_lightning(warnings: pytest.LogCaptureFixture) -> None:
    environment = (
        environments.LightningEnvironment()
    )  # else Lightning initialises MPI, if that is installed, to ask for its size
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, plugins=environment)
    libraries.keep_signal_handlers(trainer)
    trainer.fit_loop._restarting = True
    libraries.end_restart(trainer, 7)
    assert libraries.logger_step(trainer) == 7
    assert not trainer.fit_loop.restarting
    assert warnings.messages == []


def test_each_absent_name_causes_one_warning(warnings: pytest.LogCaptureFixture) -> None:
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()))
    for _ in range(2):
        libraries.keep_signal_handlers(trainer)
        assert libraries.logger_step(trainer) is None
        libraries.end_restart(trainer, None)
    assert len(warnings.messages) == 3
    assert all("Install lightning 2.6" in text for text in warnings.messages)
