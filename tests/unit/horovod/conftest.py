from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

import elasticstate.horovod as hvd
from elasticstate.horovod import world as ours
from elasticstate.worker import run, world


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has just started, and what it does to the process is undone."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(run, "_used", False)
    monkeypatch.setattr(run, "_ahead", None)
    monkeypatch.setattr(world, "_present", None)
    monkeypatch.setattr(ours, "_initialized", False)
    monkeypatch.setattr(ours, "_lane", None)
    yield
    hvd.shutdown()


@pytest.fixture
def alone(fresh: None) -> None:
    """In a world of one, before elastic.run."""
    hvd.init()
    hvd.size()


@pytest.fixture
def next_world(alone: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What a regroup is for whoever looks at the generation."""

    def enter() -> None:
        view = world.world()
        monkeypatch.setattr(world, "_present", dataclasses.replace(view, generation=view.generation + 1))

    return enter
