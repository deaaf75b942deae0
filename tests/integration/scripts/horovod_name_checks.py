"""Asynchronous calls with names on three ranks: other orders, and names in use. Called by horovod_checks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import elasticstate.horovod as hvd
from elasticstate import UsageError
from elasticstate.horovod import world

ONES = torch.ones(3)
CALLS: list[Callable[[str], Any]] = [
    lambda name: hvd.allreduce_async(ONES, name=name),
    lambda name: hvd.allreduce_async_(ONES.clone(), name=name),
    lambda name: hvd.grouped_allreduce_async([ONES, ONES], name=name),
    lambda name: hvd.allgather_async(ONES, name=name),
    lambda name: hvd.grouped_allgather_async([ONES, ONES], name=name),
    lambda name: hvd.broadcast_async(ONES, 0, name=name),
    lambda name: hvd.broadcast_async_(ONES.clone(), 0, name=name),
    lambda name: hvd.reducescatter_async(ONES, name=name),
    lambda name: hvd.grouped_reducescatter_async([ONES, ONES], name=name),
    lambda name: hvd.alltoall_async(ONES, name=name),
    lambda name: hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), name=name),
]


def check_a_name_in_use_is_refused_on_its_rank_alone() -> None:
    for call in CALLS:
        for again in (hvd.rank() == 0, hvd.rank() > 0, True):
            handle = call("x")
            if again:
                for _ in range(2):
                    with pytest.raises(ValueError, match=r"name='x.*in progress on this rank") as caught:
                        call("x")
                    assert isinstance(caught.value, UsageError)
            call("y")
            with pytest.raises(ValueError, match="in progress"):
                call("x")
            hvd.synchronize(handle)
            hvd.synchronize(call("x"))
            hvd.barrier()
    for free in (
        hvd.barrier,
        lambda: hvd.allreduce(ONES),
        lambda: hvd.synchronize(hvd.allgather_async(ONES, name="x")),
    ):
        hvd.allreduce_async(ONES, name="x")
        free()
    handle = hvd.allreduce_async(ONES, name="x")
    while not hvd.poll(handle):
        pass
    hvd.synchronize(hvd.allreduce_async(ONES, name="x"))


def check_a_name_in_use_while_the_others_make_another_call_first() -> None:
    """Rank 0 makes the call before a barrier, and the others after it, each of them twice. Nobody keeps the handles."""
    for call in CALLS:
        for mine in (hvd.rank() == 0, hvd.rank() > 0):
            if mine:
                call("x")
                with pytest.raises(ValueError, match="in progress on this rank"):
                    call("x")
            hvd.barrier()
    assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == 1


def check_asynchronous_calls_with_names_in_another_order_on_each_rank() -> None:
    rank = hvd.rank()
    for turns in range(6):
        names = ["a", "b", "c"]
        mine = names[rank:] + names[:rank]
        handles = {}
        for i, name in enumerate(mine):
            if i == turns - rank:
                hvd.barrier()
            handles[name] = hvd.allreduce_async(torch.full((2,), float(ord(name) + rank)), name=name)
            handles[name + "s"] = hvd.allgather_async(torch.full((rank,), ord(name)), name=name)
        if not 0 <= turns - rank < 3:
            hvd.barrier()
        if turns % 2:
            while not all(hvd.poll(handle) for handle in handles.values()):
                pass
        for name in reversed(mine) if turns % 3 else mine:
            assert hvd.synchronize(handles[name]).tolist() == [ord(name) + 1] * 2
            assert hvd.synchronize(handles[name + "s"]).tolist() == [ord(name)] * 3


def check_calls_of_one_name_that_differ() -> None:
    """The ranks that have gone on learn it in ``synchronize``. Their other calls match as if nothing had happened."""
    last = hvd.rank() == 2
    handle = None if last else hvd.allreduce_async(torch.ones(2), name="x")
    assert hvd.broadcast_object(hvd.rank(), 1) == 1
    if handle is None:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 2: allreduce.*float32\[3\]"):
            hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="x"))
    assert hvd.broadcast_object(hvd.rank(), 2) == 2
    if handle is not None:
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match=r"ranks 0, 1: allreduce.*float32\[2\]"):
                hvd.synchronize(handle)
    assert hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="x")).tolist() == [1, 1]


def check_calls_that_the_others_never_make() -> None:
    handle = hvd.allreduce_async(torch.ones(2), name=f"of rank {hvd.rank()}")
    assert hvd.allreduce(ONES).tolist() == [1] * 3
    with pytest.raises(UsageError, match=r"rank 0: synchronize\(\) of allreduce\(name='of rank 0'"):
        hvd.synchronize(handle)
    handle = hvd.allreduce_async(torch.ones(2), name="of rank 0" if hvd.rank() == 0 else "of others")
    with pytest.raises(UsageError, match=r"rank 0: barrier\(\); ranks 1, 2: synchronize\(\)"):
        hvd.barrier() if hvd.rank() == 0 else hvd.synchronize(handle)
    with pytest.raises(UsageError, match=r"rank 0: synchronize\(\).*ranks 1, 2: barrier\(\)"):
        hvd.barrier() if hvd.rank() > 0 else hvd.synchronize(handle)


def check_open_calls_are_listed() -> None:
    assert world.open_calls() == []
    handle = hvd.allreduce_async(ONES, name="x") if hvd.rank() == 0 else None
    hvd.barrier()
    assert world.open_calls() == (["allreduce(name='x', op=Average) of float32[3]"] if hvd.rank() == 0 else [])
    hvd.synchronize(handle or hvd.allreduce_async(ONES, name="x"))
    assert world.open_calls() == []


def check_join_waits_for_earlier_calls() -> None:
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
    else:
        hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="y", op=hvd.Sum))
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)).tolist() == [3, 3]
    if handle is not None:
        hvd.allreduce_async(torch.ones(2), name="y", op=hvd.Sum)
    assert hvd.join() == 2
    if handle is not None:
        assert hvd.synchronize(handle).tolist() == [3, 3]
