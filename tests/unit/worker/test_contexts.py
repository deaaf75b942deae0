"""A note on an exception of the script, about what is left of an earlier world."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticstate.worker import contexts


@pytest.fixture
def wrapper() -> Iterator[list[Any]]:
    """Return a list with a DistributedDataParallel whose process group ends when the list is used for the next one."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    found = [DistributedDataParallel(torch.nn.Linear(1, 1))]
    yield found
    found.clear()
    dist.destroy_process_group()


def notes(error: BaseException) -> list[str]:
    contexts.explain(error)
    return getattr(error, "__notes__", [])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_wrapper_of_an_earlier_world_is_named(wrapper: list[Any]) -> None:
    assert notes(RuntimeError("of this world")) == []
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (note,) = notes(RuntimeError("Connection reset by peer"))
    assert note.startswith("A DistributedDataParallel of an earlier world is still there")
    assert notes(KeyError("not of torch")) == []
    wrapper[:] = [DistributedDataParallel(torch.nn.Linear(1, 1))]
    assert notes(RuntimeError("another error")) == []
