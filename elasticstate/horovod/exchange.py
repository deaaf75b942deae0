"""Tensors and objects from rank to rank: allgather, broadcast, alltoall, barrier."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from elasticstate.errors import UsageError
from elasticstate.horovod import headers, world
from elasticstate.horovod.allreduce import allreduce
from elasticstate.horovod.handles import Handle
from elasticstate.horovod.headers import Kind
from elasticstate.horovod.reduction import Op
from elasticstate.state.channel import Channel

# ---------------------------------------------------------------------------------------------------------- allgather


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: object = None) -> torch.Tensor:
    """The tensors of all ranks, one after the other by rank: ``[sum of first dimensions, ...]``. Gradients flow.

    Raises UsageError, on all ranks, if they differ in anything but their first dimension.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        gathered: torch.Tensor = cast(Any, _Gather).apply(tensor)
        return gathered
    return allgather_async(tensor, name, process_set).wait()


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: object = None) -> Handle:
    """Start ``allgather``. The sizes are exchanged before it returns: one small collective."""
    world.refuse_process_set(process_set)
    generation = world.ready()
    headers.send(Kind.OTHER)
    mine = tensor.detach().contiguous()
    sizes = [count for (count,) in _counts(mine, "allgather", [len(mine)] if mine.dim() else [])]
    output = mine.new_empty(sum(sizes), *mine.shape[1:])
    parts, most = torch.split(output, sizes), max(sizes)
    if most == 0:
        return Handle([], lambda: output, generation)
    if min(sizes) == most:
        return Handle([dist.all_gather(list(parts), mine, async_op=True)], lambda: output, generation)
    padded = mine.new_zeros(most, *mine.shape[1:])
    padded[: len(mine)] = mine
    rows = [torch.empty_like(padded) for _ in sizes]

    def finish() -> torch.Tensor:
        for part, row in zip(parts, rows, strict=True):
            part.copy_(row[: len(part)])
        return output

    return Handle([dist.all_gather(rows, padded, async_op=True)], finish, generation)


def allgather_object(obj: Any, name: str | None = None, process_set: object = None) -> list[Any]:
    """The objects of all ranks, by rank. They are pickled: for ranks that trust each other."""
    world.refuse_process_set(process_set)
    world.ready()
    headers.send(Kind.OTHER)
    return [cloudpickle.loads(message) for message in Channel(None, 0).messages_of_all(cloudpickle.dumps(obj))]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.count = len(tensor)
        output = allgather_async(tensor).wait()
        counts = [count for (count,) in Channel(None, 0).numbers_of_all([ctx.count])]
        ctx.begin = sum(counts[: world.rank()])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return allreduce(gradients[0], op=Op.SUM)[ctx.begin : ctx.begin + ctx.count]


# ---------------------------------------------------------------------------------------------------------- broadcast


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """A new tensor: the one of ``root_rank``. Same shape and dtype on all ranks. Gradients flow to the root's.

    Raises UsageError if there is no such rank.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        received: torch.Tensor = cast(Any, _Broadcast).apply(tensor, root_rank)
        return received
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Handle:
    """Start ``broadcast``."""
    world.refuse_process_set(process_set)
    _announce(root_rank)
    return start_broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), root_rank)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """``broadcast`` into ``tensor``, which is returned."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Handle:
    """Start ``broadcast_``; ``tensor`` is to be left alone until ``synchronize()`` gives it back."""
    world.refuse_process_set(process_set)
    _announce(root_rank)
    return start_broadcast(tensor, root_rank)


def start_broadcast(target: torch.Tensor, root_rank: int) -> Handle:
    """Into ``target``; the others know that it comes."""
    generation = world.ready()
    sent = target.detach().contiguous()
    work = dist.broadcast(sent, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if sent.data_ptr() != target.data_ptr():
            target.detach().copy_(sent)
        return target

    return Handle([work], finish, generation)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: object = None) -> Any:
    """The object of ``root_rank``; what others give is ignored. It is pickled: for ranks that trust each other."""
    world.refuse_process_set(process_set)
    _announce(root_rank)
    channel = Channel(None, root_rank)
    if world.rank() == root_rank:
        channel.send(cloudpickle.dumps(obj))
        return obj
    return cloudpickle.loads(channel.receive())


def _announce(root_rank: int) -> None:
    """Raises UsageError if there is no such rank, or some have joined."""
    world.ready()
    if not 0 <= root_rank < world.size():
        raise UsageError(f"root_rank={root_rank}: the world has the ranks 0 to {world.size() - 1}")
    headers.send(Kind.OTHER)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        ctx.root_rank = root_rank
        return broadcast_async(tensor, root_rank).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = allreduce(gradients[0], op=Op.SUM)
        return (gradient if world.rank() == ctx.root_rank else torch.zeros_like(gradient)), None


# ------------------------------------------------------------------------------------------------ alltoall and barrier


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Give each rank its share of the first dimension, and get one's own from each, by rank.

    Args:
        splits: how much each rank gets: size() numbers that add up to the first dimension. None: all the same.

    Returns the received; with ``splits`` also how much came from each rank (``int64[size]``). No gradient flows.

    Raises UsageError if the splits do not fit, or tensors differ in more than their first dimension.
    """
    world.refuse_process_set(process_set)
    world.ready()
    mine, ranks = tensor.detach().contiguous(), world.size()
    given = [len(mine) // ranks] * ranks if splits is None else [int(n) for n in splits]
    if mine.dim() == 0 or len(given) != ranks or min(given) < 0 or sum(given) != len(mine):
        raise UsageError(f"alltoall: {given} does not share out the first dimension of {tuple(mine.shape)}")
    headers.send(Kind.OTHER)
    received = [row[world.rank()] for row in _counts(mine, "alltoall", given)]
    output = mine.new_empty(sum(received), *mine.shape[1:])
    dist.all_to_all_single(output, mine, received, given)
    return output if splits is None else (output, torch.tensor(received))


def barrier(process_set: object = None) -> None:
    """Wait until all ranks are here."""
    world.refuse_process_set(process_set)
    world.ready()
    headers.send(Kind.BARRIER)
    dist.barrier()


def _counts(mine: torch.Tensor, what: str, counts: list[int]) -> list[list[int]]:
    """Those of each rank, by rank. UsageError on all ranks if not all give the same kind of tensor."""
    kind = zlib.crc32(repr((mine.dim() > 0, mine.shape[1:], mine.dtype)).encode())
    rows = Channel(None, 0).numbers_of_all([kind, *(counts or [0])])
    if any(row[0] != kind for row in rows) or mine.dim() == 0:
        raise UsageError(
            f"{what}: the tensors of all ranks need the same dtype and, but for the first one, the same dimensions; "
            f"here it is {mine.dtype} of {tuple(mine.shape)}"
        )
    return [row[1:] for row in rows]
