"""The local rank in a world in which a slot is missing: of the worker itself, of libraries, and of the environment."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch

import elasticstate as elastic
from elasticstate import extension, present_world
from elasticstate.core.ids import WorkerId
from elasticstate.core.types import Placement, World

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world of the slots 1 and 2 of one host, seen from slot 2."""
    for name in NAMES:
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores the variable
    monkeypatch.setattr(present_world, "_present", None)
    place = Placement(WorkerId("localhost", 2, 1), 1, 2, 2, 1, 0, 1)
    return msgspec.structs.replace(present_world.alone(), members=(place,), size=2)


def test_libraries_get_the_place_and_the_worker_its_slot(second_of_two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    present_world.enter(second_of_two)
    assert os.environ["LOCAL_RANK"] == "1"
    assert extension.libraries_local_rank() == extension.local_place() == 1
    assert elastic.local_rank() == 2
    assert not elastic.local_leader()


def test_where_torch_sees_several_devices_libraries_get_the_slot(
    second_of_two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`` must not change the device of a survivor."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    present_world.enter(second_of_two)
    assert os.environ["LOCAL_RANK"] == "2"
    assert extension.libraries_local_rank() == elastic.local_rank() == 2
    assert extension.local_place() == 1


def test_before_the_first_world_both_are_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(present_world, "_present", None)
    assert extension.libraries_local_rank() == elastic.local_rank() == 0
    assert extension.local_place() == 0
