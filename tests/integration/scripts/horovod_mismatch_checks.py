"""Calls that differ among three ranks: all ranks raise the same error. Called by horovod_checks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elasticstate.horovod as hvd
from elasticstate import UsageError


def error(call: Callable[[], object]) -> str:
    """Return the message of the UsageError. Checks that all ranks raise the same one, and that it is Horovod's, too."""
    with pytest.raises(UsageError) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, hvd.HorovodInternalError)
    assert isinstance(caught.value, ValueError), "as an invalid argument is in Horovod"
    messages = hvd.allgather_object(message)
    assert messages == [message] * 3
    return message


def case(call: Callable[[int], object], usual: str, unlike: str, rank: int = 1) -> None:
    """Check the error if one rank calls ``call(1)`` and all other ranks call ``call(0)``."""
    message = error(lambda: call(int(hvd.rank() == rank)))
    others = ", ".join(str(r) for r in range(3) if r != rank)
    assert f"ranks {others}: {usual}" in message, message
    assert f"rank {rank}: {unlike}" in message, message
    assert "Make the same calls in the same order on all ranks" in message


def check_that_unlike_allreduces_are_refused() -> None:
    dtypes = (torch.float32, torch.int32)
    case(
        lambda i: hvd.allreduce(torch.ones(4, dtype=dtypes[i])),
        "allreduce(op=Average) of float32[4]",
        "allreduce(op=Average) of int32[4]",
    )
    for unlike in range(3):
        case(lambda i: hvd.allreduce_(torch.ones(4 - 2 * i)), "allreduce(op=Average) of float32[4]", "all", unlike)
    case(lambda i: hvd.allreduce(torch.ones((2, 2) if i else 4)), "allreduce(op=Average) of float32[4]", "all", 2)
    case(lambda i: hvd.allreduce_async(torch.ones(4 + i)), "allreduce(op=Average) of float32[4]", "all")
    case(lambda i: hvd.grouped_allreduce([torch.ones(3), torch.ones(3 + i)]), "allreduce(op=Average) of", "all")
    case(
        lambda i: hvd.allreduce(torch.ones(4), name="xy"[i], op=(hvd.Sum, hvd.Max)[i]),
        "allreduce(name='x', op=Sum)",
        "allreduce(name='y', op=Max)",
    )
    case(
        lambda i: hvd.allreduce(torch.ones(4), op=hvd.Sum, postscale_factor=1 + i),
        "allreduce(op=Sum) of float32[4]",
        "allreduce(op=Sum, postscale_factor=2) of float32[4]",
    )
    case(
        lambda i: hvd.allreduce(torch.eye(2).to_sparse() if i else torch.eye(2)),
        "allreduce(op=Average) of float32[2, 2]",
        "allreduce(op=Average) of float32[2, 2], sparse_coo: the tensor is sparse_coo: call to_dense() on it",
    )
    assert "the dtype must be one of float32," in error(lambda: hvd.allreduce(torch.ones(1, dtype=torch.float8_e5m2)))
    assert hvd.allreduce(torch.ones(4)).tolist() == [1] * 4


def check_that_unlike_kinds_of_calls_are_refused() -> None:
    kinds: list[tuple[Callable[[], object], str]] = [
        (lambda: hvd.allreduce(torch.ones(2)), "allreduce(op=Average) of float32[2]"),
        (lambda: hvd.allgather(torch.ones(2)), "allgather() of float32[*]"),
        (lambda: hvd.broadcast(torch.ones(2), 1), "broadcast(root_rank=1) of float32[2]"),
        (lambda: hvd.alltoall(torch.ones(3)), "alltoall() of float32[*]"),
        (lambda: hvd.allgather_object(1), "allgather_object()"),
        (lambda: hvd.broadcast_object(1), "broadcast_object(root_rank=0)"),
        (lambda: hvd.broadcast_parameters({"w": torch.ones(1)}), "broadcast_parameters(root_rank=0)"),
        (hvd.barrier, "barrier()"),
    ]
    for first, second in zip(kinds, kinds[1:] + kinds[:1], strict=True):
        case(lambda i, calls=(first[0], second[0]): calls[i](), first[1], second[1])  # type: ignore[misc]


def check_that_unlike_broadcasts_and_gathers_are_refused() -> None:
    dtypes = (torch.float32, torch.int64)
    case(lambda i: hvd.broadcast(torch.ones(2 + i), 0), "broadcast(root_rank=0) of float32[2]", "broadcast", 0)
    case(lambda i: hvd.broadcast_(torch.ones(2, dtype=dtypes[i]), 0), "broadcast(root_rank=0) of float32[2]", "b")
    case(lambda i: hvd.broadcast(torch.ones(2), i), "broadcast(root_rank=0)", "broadcast(root_rank=1)", 2)
    case(lambda i: hvd.broadcast_object(1, 3 * i), "broadcast_object(root_rank=0)", "broadcast_object(root_rank=3): ro")
    case(lambda i: hvd.allgather(torch.ones(2, 2 + i)), "allgather() of float32[*, 2]", "allgather() of float32[*, 3]")
    case(lambda i: hvd.allgather(torch.tensor(1.0) if i else torch.ones(1)), "allgather() of float32[*]", "allgather")
    case(lambda i: hvd.alltoall(torch.ones(3, 2, dtype=dtypes[i])), "alltoall() of float32[*, 2]", "alltoall")
    case(
        lambda i: hvd.alltoall(torch.ones(3), splits=[1, 1, 1 + i]),
        "alltoall() of float32[*]",
        "alltoall() of float32[*]: splits=[1, 1, 2] must be 3 numbers that add up to the first dimension, 3",
    )
    case(
        lambda i: hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(2 + i), "c": torch.ones(1)}),
        "broadcast_parameters(root_rank=0) with b: float32[2]",
        "broadcast_parameters(root_rank=0) with b: float32[3]",
    )
    case(
        lambda i: hvd.broadcast_parameters({"a": torch.ones(1)} if i else {"a": torch.ones(1), "b": torch.ones(2)}),
        "broadcast_parameters(root_rank=0) with b: float32[2]",
        "broadcast_parameters(root_rank=0) with nothing more",
    )
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2 + i))]) for i in range(2)]
    case(lambda i: hvd.broadcast_optimizer_state(optimizers[i]), "broadcast_optimizer_state(root_rank=0) with", "b")


def check_that_steps_of_unlike_models_are_refused() -> None:
    """Check that no gradient of the first step is sent before all ranks agree on the model."""
    for how in ("shape", "name", "dtype", "number"):
        unlike = hvd.rank() == 1
        width = 3 if how == "shape" and unlike else 2
        head = {"head" if how == "name" and unlike else "last": nn.Linear(width, 1)}
        model = nn.Sequential(nn.Linear(2, width))
        named = [
            *model.named_parameters(),
            *((f"{k}.{n}", p) for k, m in head.items() for n, p in m.named_parameters()),
        ]
        if how == "dtype" and unlike:
            named = [(name, nn.Parameter(p.detach().double())) for name, p in named]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named)
        for _, p in named:
            p.square().sum().backward()
        call = optimizer.step if how != "number" or not unlike else hvd.barrier
        message = error(call)
        assert "ranks 0, 2: a step of DistributedOptimizer(op=Average, " in message
        assert {
            "shape": "rank 1: a step of DistributedOptimizer(op=Average, compression=Unchanged, "
            "backward_passes_per_step=1) with last.weight: float32[1, 3]",
            "name": "with head.bias: float32[1]",
            "dtype": "with last.bias: float64[1]",
            "number": "rank 1: barrier()",
        }[how] in message, message


def check_that_unlike_calls_are_refused_while_a_rank_has_joined() -> None:
    """Check that the rank that has joined takes no notice, and that the others can go on."""
    for joined, call, match in (
        (0, lambda: hvd.allreduce(torch.ones(hvd.rank())), r"rank 1: allreduce.* of float32\[1\]; rank 2: allreduce"),
        (1, lambda: hvd.broadcast(torch.ones(1), 7), "root_rank must be a rank of the world, 0 to 2"),
        (2, lambda: hvd.allgather(torch.ones(1, 2 + hvd.rank())), r"rank 0: allgather.*rank 1: allgather"),
    ):
        if hvd.rank() != joined:
            for _ in range(2):
                with pytest.raises(hvd.HorovodInternalError, match=match):
                    call()
            assert hvd.allreduce(torch.ones(4), op=hvd.Sum).tolist() == [2] * 4
        assert hvd.join() == (1 if joined == 2 else 2)
        assert hvd.allreduce(torch.ones(4)).tolist() == [1] * 4
