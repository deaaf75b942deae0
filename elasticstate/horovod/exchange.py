"""Exchange of tensors and objects between ranks: allgather, broadcast, alltoall, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from elasticstate.extension import Channel
from elasticstate.horovod import calls, headers, world
from elasticstate.horovod.allreduce import allreduce
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.handles import Handle
from elasticstate.horovod.reduction import Op

# ---------------------------------------------------------------------------------------------------------- allgather


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: object = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated by rank: ``[sum of first dimensions, ...]``. Gradients flow.

    The gradient is the average over all ranks, as in Horovod. The derivative of the sum over ranks would be the sum.

    Raises UsageError, on all ranks, if the tensors differ in more than their first dimension, or have no dimension.
    """
    world.refuse_process_set(process_set)
    if torch.is_grad_enabled() and tensor.requires_grad:
        gathered: torch.Tensor = cast(Any, _Gather).apply(tensor, name)
        return gathered
    return _start_gather(tensor, name)[0].wait()


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: object = None) -> Handle:
    """Start ``allgather``. One small collective exchanges the sizes before it returns."""
    world.refuse_process_set(process_set)
    return _start_gather(tensor, name)[0]


def _start_gather(tensor: torch.Tensor, name: str | None) -> tuple[Handle, list[int]]:
    """Start the gather. Also return the first dimension of each rank's tensor."""
    generation = world.ready()
    lines = (f"{calls.signature('allgather', name)} of {calls.form(tensor, any_length=True)}",)
    headers.agree(Call(CallKind.OTHER, lines, wrong=calls.refusal(tensor, needs_dimension=True)))
    own = tensor.detach().contiguous()
    sizes = [count for (count,) in Channel(None, 0).numbers_of_all([len(own)])]
    output = own.new_empty(sum(sizes), *own.shape[1:])
    parts, most = torch.split(output, sizes), max(sizes)
    if most == 0:
        return Handle([], lambda: output, generation), sizes
    if min(sizes) == most:
        return Handle([dist.all_gather(list(parts), own, async_op=True)], lambda: output, generation), sizes
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    rows = [torch.empty_like(padded) for _ in sizes]

    def finish() -> torch.Tensor:
        for part, row in zip(parts, rows, strict=True):
            part.copy_(row[: len(part)])
        return output

    return Handle([dist.all_gather(rows, padded, async_op=True)], finish, generation), sizes


def allgather_object(obj: Any, name: str | None = None, process_set: object = None) -> list[Any]:
    """Return the objects of all ranks, by rank. They are pickled, so all ranks must trust each other."""
    world.refuse_process_set(process_set)
    world.ready()
    headers.agree(Call(CallKind.OTHER, (calls.signature("allgather_object", name),)))
    return [cloudpickle.loads(message) for message in Channel(None, 0).messages_of_all(cloudpickle.dumps(obj))]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        handle, sizes = _start_gather(tensor, name)
        ctx.begin, ctx.count = sum(sizes[: world.rank()]), len(tensor)
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return allreduce(gradients[0], op=Op.AVERAGE)[ctx.begin : ctx.begin + ctx.count], None


# ---------------------------------------------------------------------------------------------------------- broadcast


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Return a new tensor: that of ``root_rank``. Shape and dtype are equal on all ranks. Gradients flow to the root's.

    The gradient is the average over all ranks, as in Horovod. The derivative of the sum over ranks would be the sum.

    Raises UsageError, on all ranks, if there is no such rank, or roots, dtypes or shapes differ.
    """
    world.refuse_process_set(process_set)
    if torch.is_grad_enabled() and tensor.requires_grad:
        received: torch.Tensor = cast(Any, _Broadcast).apply(tensor, root_rank, name)
        return received
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Handle:
    """Start ``broadcast``. ``synchronize()`` returns the new tensor."""
    world.refuse_process_set(process_set)
    _agree("broadcast", root_rank, name, tensor)
    return start_broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), root_rank)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Run ``broadcast`` into ``tensor``, and return ``tensor``."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Handle:
    """Start ``broadcast_``. Do not use ``tensor`` until ``synchronize()`` returns it."""
    world.refuse_process_set(process_set)
    _agree("broadcast", root_rank, name, tensor)
    return start_broadcast(tensor, root_rank)


def start_broadcast(target: torch.Tensor, root_rank: int) -> Handle:
    """Start a broadcast into ``target``, whose form all ranks have agreed on."""
    generation = world.ready()
    sent = target.detach().contiguous()
    work = dist.broadcast(sent, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if sent.data_ptr() != target.data_ptr():
            target.detach().copy_(sent)
        return target

    return Handle([work], finish, generation)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: object = None) -> Any:
    """Return the object of ``root_rank``. ``obj`` of other ranks is ignored.

    The object is pickled, so all ranks must trust the root.

    Raises UsageError, on all ranks, if there is no such rank, or roots differ.
    """
    world.refuse_process_set(process_set)
    _agree("broadcast_object", root_rank, name)
    channel = Channel(None, root_rank)
    if world.rank() == root_rank:
        channel.send(cloudpickle.dumps(obj))
        return obj
    return cloudpickle.loads(channel.receive())


def _agree(function: str, root_rank: int, name: str | None, tensor: torch.Tensor | None = None) -> None:
    world.ready()
    line = calls.signature(function, name, root_rank=root_rank)
    wrong = world.refusal_of_root(root_rank)
    if tensor is not None:
        line += f" of {calls.form(tensor)}"
        wrong = wrong or calls.refusal(tensor)
    headers.agree(Call(CallKind.OTHER, (line,), wrong=wrong))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        return broadcast_async(tensor, root_rank, name).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = allreduce(gradients[0], op=Op.AVERAGE)
        return (gradient if world.rank() == ctx.root_rank else torch.zeros_like(gradient)), None, None


# ------------------------------------------------------------------------------------------------ alltoall and barrier


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send each rank a share of the first dimension, and receive one share from each, in the order of ranks.

    Args:
        splits: length of each rank's share: size() numbers that add up to the first dimension. None: equal shares.
        process_set: must be None.

    Returns the received tensor; with ``splits`` also the length received from each rank, with the dtype of ``splits``
    (``int32[size]`` for a list). Gradients flow back to the ranks that sent the shares.

    Raises UsageError, on all ranks, if the splits do not fit, or tensors differ in more than their first dimension.
    """
    world.refuse_process_set(process_set)
    output, received = cast("tuple[torch.Tensor, torch.Tensor]", cast(Any, _Alltoall).apply(tensor, splits, name))
    return output if splits is None else (output, received)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, name: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        world.ready()
        ranks, rows = world.size(), len(tensor) if tensor.dim() else 0
        given = [rows // ranks] * ranks if splits is None else [int(n) for n in splits]
        wrong = calls.refusal(tensor, needs_dimension=True)
        if not wrong and (len(given) != ranks or min(given) < 0 or sum(given) != rows):
            wrong = f"splits={given} must be {ranks} numbers that add up to the first dimension, {rows}"
        lines = (f"{calls.signature('alltoall', name)} of {calls.form(tensor, any_length=True)}",)
        headers.agree(Call(CallKind.OTHER, lines, wrong=wrong))
        own = tensor.detach().contiguous()
        ctx.received = [row[world.rank()] for row in Channel(None, 0).numbers_of_all(given)]
        output = own.new_empty(sum(ctx.received), *own.shape[1:])
        dist.all_to_all_single(output, own, ctx.received, given)
        template = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
        received = template.new_tensor(ctx.received)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        output, _ = alltoall(gradients[0], ctx.received)
        return output, None, None


def barrier(process_set: object = None) -> None:
    """Wait until all ranks have called this."""
    world.refuse_process_set(process_set)
    world.ready()
    headers.agree(Call(CallKind.BARRIER, ("barrier()",)))  # the header waits for all
