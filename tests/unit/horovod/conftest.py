from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

import elasticstate.horovod as hvd
from elasticstate import present_world
from elasticstate.horovod import timeline, world
from elasticstate.worker import run


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test the state of a process that has just started. The changes are undone afterwards."""
    places = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    for name in (
        *(f"HOROVOD_{place}" for place in places),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores the variable
        monkeypatch.delenv(name)
    monkeypatch.setattr(run, "_used", False)
    monkeypatch.setattr(run, "_loop", None)
    monkeypatch.setattr(run, "_has_joined", False)
    monkeypatch.setattr(run, "_is_past_gate", False)
    monkeypatch.setattr(run, "_keeps_last_world", False)
    monkeypatch.setattr(present_world, "_present", None)
    monkeypatch.setattr(world, "_initialized", False)
    monkeypatch.setattr(world, "_exported_in", 0)
    monkeypatch.setattr(world, "_made", None)
    monkeypatch.setattr(world, "_sets", {})
    monkeypatch.setattr(world, "_members", {})
    monkeypatch.setattr(world, "_added", [])
    monkeypatch.setattr(timeline, "_recorder", None)
    yield
    if timeline.present() is not None:
        hvd.stop_timeline()
    hvd.shutdown()
    run.end_last_world()


@pytest.fixture
def alone(fresh: None) -> None:
    """Enter a world of one, before elastic.run."""
    hvd.init()
    hvd.size()


@pytest.fixture
def next_world(alone: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that increments the generation, as a regroup does."""

    def enter() -> None:
        view = present_world.world()
        monkeypatch.setattr(present_world, "_present", msgspec.structs.replace(view, generation=view.generation + 1))

    return enter
