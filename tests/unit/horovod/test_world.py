from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elasticstate
import elasticstate.horovod as hvd
from elasticstate import CollectiveError, NotInWorldError, UsageError, extension
from elasticstate.horovod import world

NEEDING_A_WORLD: list[Callable[[], Any]] = [
    hvd.rank,
    hvd.size,
    hvd.local_size,
    hvd.cross_rank,
    hvd.cross_size,
    hvd.is_homogeneous,
    hvd.barrier,
    lambda: hvd.allreduce(torch.ones(1)),
    lambda: hvd.broadcast_object(1),
]


def test_all_names_are_there() -> None:
    assert sorted(hvd.__all__) == sorted(set(hvd.__all__))
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert all(hasattr(hvd.elastic, name) for name in hvd.elastic.__all__)


@pytest.mark.parametrize("function", [hvd.local_rank, *NEEDING_A_WORLD])
def test_before_init_the_remedy_is_named(fresh: None, function: Callable[[], Any]) -> None:
    with pytest.raises(NotInWorldError, match=r"init\(\)"):
        function()


def test_init_and_local_rank_join_no_world(fresh: None) -> None:
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.is_initialized()
    assert hvd.local_rank() == 0
    with pytest.raises(NotInWorldError):
        elasticstate.rank()
    assert not dist.is_initialized()


@pytest.mark.parametrize("function", NEEDING_A_WORLD)
def test_what_needs_a_world_joins_one(fresh: None, function: Callable[[], Any]) -> None:
    hvd.init()
    function()
    assert elasticstate.size() == 1
    assert dist.is_initialized()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    function()
    assert dist.is_initialized()
    extension.end_last_world()
    assert not dist.is_initialized()


def test_a_communicator_is_refused(fresh: None) -> None:
    with pytest.raises(UsageError, match="add_process_set"):
        hvd.init(comm=[0, 1])
    hvd.init(comm=None, process_sets=None)
    assert world._added == []


def test_process_sets_of_init(fresh: None) -> None:
    first = hvd.ProcessSet([0])
    assert first.included() is first.rank() is first.size() is first.process_set_id is None
    hvd.init(process_sets=[first, [1, 0]])
    hvd.init(process_sets=[first])
    (_, second) = world._added
    assert world._added == [first, second]
    assert second.ranks == [0, 1]
    assert not dist.is_initialized(), "a process set does not join the world"
    assert (first.included(), first.rank(), first.size()) == (True, 0, 1)
    assert hvd.allreduce(torch.ones(1), process_set=first).tolist() == [1]
    with pytest.raises(UsageError, match="needs rank 1, but the world has 1 ranks"):
        hvd.allreduce(torch.ones(1), process_set=second)
    assert "ranks=[0, 1]" in repr(second)
    assert hvd.global_process_set.ranks == [0]
    assert (hvd.global_process_set.included(), hvd.global_process_set.rank(), hvd.global_process_set.size()) == (
        True,
        0,
        1,
    )


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1], ["0"], [True], 3, [0.0]])
def test_ranks_of_a_process_set_are_checked(ranks: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        hvd.ProcessSet(ranks)


ABSENT: list[tuple[Callable[[], Any], str]] = [
    (lambda: hvd.allreduce(torch.ones(1), process_set=1), "must be a ProcessSet"),  # type: ignore[arg-type]
    (lambda: hvd.broadcast_parameters({}, process_set=1), "must be a ProcessSet"),  # type: ignore[arg-type]
    (lambda: hvd.allgather(torch.ones(1), process_set=hvd.ProcessSet([0])), "add_process_set"),
    (lambda: hvd.start_timeline("/no/such/directory/file"), "there is no directory /no/such/directory"),
    (lambda: hvd.start_timeline("/"), "cannot be written"),
    (lambda: hvd.stop_timeline(), "start_timeline"),
    (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "Average or Sum"),
    (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "Pass op alone"),
    (lambda: hvd.allreduce(torch.ones(1, requires_grad=True), op=hvd.Max), "detach"),
    (lambda: hvd.broadcast(torch.ones(1), 1), "root_rank=1"),
    (lambda: hvd.broadcast_object(1, 1), "root_rank=1"),
    (lambda: hvd.broadcast_parameters({"a": 1}), "broadcast_object"),
    (lambda: hvd.broadcast_parameters([torch.ones(1)]), "pairs"),  # type: ignore[list-item]  # the wrong type
]


@pytest.mark.parametrize(("function", "remedy"), ABSENT)
def test_what_is_absent_says_what_to_do(alone: None, function: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        function()


def test_nobody_is_waited_for_alone(alone: None) -> None:
    assert hvd.join() == 0


def test_a_handle_of_a_world_that_is_over(alone: None, next_world: Callable[[], None]) -> None:
    handle = hvd.allreduce_async(torch.ones(2))
    next_world()
    with pytest.raises(CollectiveError, match="generation 1"):
        hvd.synchronize(handle)


def test_builds() -> None:
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not any((hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.ccl_built(), hvd.ddl_built()))
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    assert hvd.nccl_built() == dist.is_nccl_available()
    assert hvd.mpi_built() == dist.is_mpi_available()


def test_its_exceptions_are_ours() -> None:
    assert hvd.HorovodInternalError is elasticstate.CollectiveError
    assert issubclass(hvd.HostsUpdatedInterrupt, elasticstate.HostsUpdatedInterrupt)
    assert issubclass(hvd.HostsUpdatedInterrupt, RuntimeError), "as in Horovod"
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
