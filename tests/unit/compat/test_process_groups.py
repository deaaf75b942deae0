"""Private names of torch.distributed: a change in torch fails here. At run time it is a clear error or a warning."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticstate import compat
from elasticstate.compat import process_groups
from elasticstate.compat.process_groups import HashStore
from elasticstate.errors import UsageError


@pytest.fixture
def world() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------- the names in torch


def test_the_helper_that_creates_groups_has_the_same_arguments() -> None:
    parameters = list(inspect.signature(distributed_c10d._new_process_group_helper).parameters)
    assert parameters[0] == "group_size"
    assert "timeout" in parameters


def test_init_process_group_and_new_group_call_the_helper(world: None) -> None:
    dist.destroy_process_group()
    sizes = []

    def creator(create: Any, size: int, args: Any, kwargs: Any) -> Any:
        sizes.append(size)
        assert "timeout" in kwargs
        return create(*args, **kwargs)

    restore = process_groups.replace_group_creation(creator)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    restore()
    dist.new_group([0])
    assert sizes == [1, 1]


def test_the_public_function_sets_the_timeout_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(dist, "set_timeout", lambda timeout, group: given.append(timeout), raising=False)
    process_groups.set_default_group_timeout(timedelta(seconds=7))
    assert given == [timedelta(seconds=7)]


def test_split_group_is_a_method_that_can_be_replaced() -> None:
    original: Any = dist.ProcessGroup.split_group
    restore = process_groups.replace_group_creation(lambda create, size, args, kwargs: (size, kwargs))
    try:
        parent: Any = dist.ProcessGroup(0, 3)  # type: ignore[call-arg]
        assert parent.split_group([0, 1], group_desc="x") == (2, {"group_desc": "x"})
        second = timedelta(seconds=1)
        assert parent.split_group([0, 1], second, None, "name") == (
            2,
            {"timeout": second, "opts": None, "group_name": "name"},
        )
    finally:
        restore()
    assert dist.ProcessGroup.split_group is original


def test_the_count_of_groups_is_a_part_of_their_names(world: None) -> None:
    count = distributed_c10d._world.group_count
    assert dist.new_group([0]).group_name == str(count)
    assert distributed_c10d._world.group_count == count + 1
    process_groups.reset_group_count()
    assert distributed_c10d._world.group_count == 0


def test_the_timeout_of_the_default_group_can_be_changed(world: None) -> None:
    process_groups.set_default_group_timeout(timedelta(seconds=77))
    part = process_groups.part_for(dist.group.WORLD, torch.device("cpu"))
    assert part.options._timeout == timedelta(seconds=77)


def test_groups_and_their_parts_can_be_found(world: None) -> None:
    process_groups.require_group_parts()
    group = dist.new_group([0])
    assert process_groups.all_groups() == [dist.group.WORLD, group]
    assert process_groups.part_for(group, torch.device("cpu")).name() == "gloo"


def test_torch_calls_the_class_of_the_mpi_backend() -> None:
    """Its wheels contain no MPI backend, but the code that uses one."""
    asked = []

    class Maker:
        def create(self, ranks: list[int]) -> Any:
            asked.append(ranks)
            return dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=9))

    before = dist.is_mpi_available()
    restore = process_groups.use_as_mpi_backend(Maker())
    try:
        assert dist.is_mpi_available()
        dist.init_process_group("mpi")
        assert asked == [[]]
    finally:
        dist.destroy_process_group()
        restore()
    assert dist.is_mpi_available() == before


# -------------------------------------------------------------------------------------------------- a name is absent


def test_without_the_helper_the_error_names_the_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_new_process_group_helper")
    with pytest.raises(
        UsageError, match=rf"^torch {re.escape(torch.__version__)} has no _new_process_group_helper, .* Install "
    ):
        process_groups.replace_group_creation(lambda create, size, args, kwargs: None)


def test_without_the_mpi_backend_the_error_names_the_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_MPI_AVAILABLE")
    with pytest.raises(UsageError, match="_MPI_AVAILABLE"):
        process_groups.use_as_mpi_backend(None)


def test_without_the_parts_of_groups_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_world", object())
    with pytest.raises(UsageError, match=r"pg_map.*NCCL"):
        process_groups.require_group_parts()


def test_other_absent_names_are_one_warning_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compat.warn_absent.cache_clear()
    monkeypatch.setattr(distributed_c10d, "_world", object())
    monkeypatch.delattr(distributed_c10d, "_set_pg_timeout", raising=False)
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    with caplog.at_level(logging.WARNING, logger="elasticstate"):
        for _ in range(2):
            process_groups.reset_group_count()
            process_groups.set_default_group_timeout(timedelta(seconds=1))
    assert [record.getMessage().partition(" has no ")[2].partition(",")[0] for record in caplog.records] == [
        "torch.distributed.distributed_c10d._world.group_count",
        "torch.distributed.distributed_c10d._set_pg_timeout",
    ]
