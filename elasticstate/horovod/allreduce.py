"""allreduce: one tensor out of those of all ranks.

Tensors of several calls are matched by the order of the calls, the same on all ranks; names are for Horovod's sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from elasticstate.errors import UsageError
from elasticstate.horovod import headers, world
from elasticstate.horovod.compression import Compression, Compressor
from elasticstate.horovod.handles import Handle
from elasticstate.horovod.headers import Kind
from elasticstate.horovod.reduction import Op, chosen, divide, of_torch, scale


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """A new tensor: the average (or ``op``) over all ranks of ``tensor``, which has the same shape and dtype on all.

    Gradients flow through Average and Sum. Averages of integers are rounded down.

    Args:
        average: the old spelling: True is ``op=Average``, False ``op=Sum``.
        compression: what is sent instead of the tensor.
        prescale_factor, postscale_factor: multiply before and after.

    Raises UsageError for arguments that cannot be; what torch raises when a peer is gone.
    """
    world.refuse_process_set(process_set)
    op = chosen(average, op)
    if torch.is_grad_enabled() and tensor.requires_grad:
        if op not in (Op.AVERAGE, Op.SUM):
            raise UsageError(f"no gradient flows through op={op.value}: detach() the tensor, or use Average or Sum")
        reduced: torch.Tensor = cast(Any, _Differentiable).apply(
            tensor, op, prescale_factor, postscale_factor, compression
        )
        return reduced
    return _start(tensor, False, op, prescale_factor, postscale_factor, compression).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Handle:
    """Start ``allreduce``; ``synchronize()`` gives the new tensor. No gradient flows through it."""
    world.refuse_process_set(process_set)
    return _start(tensor, False, chosen(average, op), prescale_factor, postscale_factor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """``allreduce`` in place; returns ``tensor``."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Handle:
    """Start ``allreduce_``; ``tensor`` is to be left alone until ``synchronize()`` gives it back."""
    world.refuse_process_set(process_set)
    return _start(tensor, True, chosen(average, op), prescale_factor, postscale_factor)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """``allreduce`` of several tensors at once: new ones, in the same order."""
    world.refuse_process_set(process_set)
    op = chosen(average, op)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        factors = prescale_factor, postscale_factor
        return [allreduce(tensor, None, None, compression, op, *factors) for tensor in tensors]
    handles = [_start(tensor, False, op, prescale_factor, postscale_factor, compression) for tensor in tensors]
    return [handle.wait() for handle in handles]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return _start(tensor, False, *how).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Each rank's tensor is in each rank's output: the gradient is reduced like the tensor."""
        return _start(gradients[0], False, *ctx.how).wait(), None, None, None, None


def _start(
    tensor: torch.Tensor,
    in_place: bool,
    op: Op,
    prescale: float,
    postscale: float,
    compression: type[Compressor] = Compression.none,
) -> Handle:
    of_world = of_torch(op)
    generation = world.ready()
    ranks = dist.get_world_size()
    with torch.no_grad():
        sent, context = compression.compress(tensor.detach())
        sent = sent.contiguous()
        if not in_place and sent.data_ptr() == tensor.data_ptr():
            sent = sent.clone()
        scale(sent, prescale)
    headers.send(Kind.ALLREDUCE, headers.OPS.index(op), sent.numel(), headers.DTYPES.index(sent.dtype))
    work = dist.all_reduce(sent, of_world, async_op=True)

    def finish() -> torch.Tensor:
        output = compression.decompress(sent, context)
        if op is Op.AVERAGE:
            divide(output, ranks)
        scale(output, postscale)
        if not in_place:
            return output
        if output.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(output)
        return tensor

    return Handle([work], finish, generation)
