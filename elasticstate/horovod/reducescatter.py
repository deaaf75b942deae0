"""Reducescatter: reduce the tensors of all ranks to one, and give each rank a share of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from elasticstate.horovod import calls, matching, timeline
from elasticstate.horovod.allgather import allgather
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.compression import Compression, Compressor
from elasticstate.horovod.handles import Handle, together
from elasticstate.horovod.process_sets import ProcessSet, members_of
from elasticstate.horovod.reduction import Op, reducible, refusal, scale, torch_operation


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's share of the average (or sum) of ``tensor`` over all ranks.

    Shape and dtype are equal on all ranks. The first dimension is divided by rank. If it cannot be divided evenly, the
    first ranks get one row more. Gradients flow. With Sum, the gradient is multiplied by size(), as in Horovod.

    Args:
        compression: compressor for the tensor that is sent.
        op: Average or Sum.
        process_set: ranks that take part; None: all.
        prescale_factor, postscale_factor: factors before and after the reduction.

    Raises UsageError, on all ranks, if their tensors or arguments differ or are invalid, and torch's error if a peer
    dies.
    """
    factors = prescale_factor, postscale_factor
    if torch.is_grad_enabled() and tensor.requires_grad:
        arguments = name, compression, op, process_set, *factors
        reduced: torch.Tensor = cast(Any, _Differentiable).apply(tensor, *arguments)
        return reduced
    return _start(tensor, name, True, compression, op, process_set, *factors).wait()


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start ``reducescatter``. ``synchronize()`` returns the share. No gradient flows through it."""
    return _start(tensor, name, False, Compression.none, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run ``reducescatter`` on several tensors at once. Return the shares in the same order. Gradients flow."""
    arguments = compression, op, process_set, prescale_factor, postscale_factor
    named = list(zip(tensors, calls.names_of_parts(name, len(tensors)), strict=True))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return [reducescatter(tensor, part, *arguments) for tensor, part in named]
    handles = [_start(tensor, part, True, *arguments) for tensor, part in named]
    return [handle.wait() for handle in handles]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start ``grouped_reducescatter``. ``synchronize()`` returns the shares. No gradient flows through them."""
    generation = members_of(process_set).generation
    factors = prescale_factor, postscale_factor
    named = zip(tensors, calls.names_of_parts(name, len(tensors)), strict=True)
    return together([reducescatter_async(t, part, op, process_set, *factors) for t, part in named], generation)


def _start(
    tensor: torch.Tensor,
    name: str | None,
    waits: bool,
    compression: type[Compressor],
    op: Op,
    process_set: ProcessSet | None,
    prescale: float,
    postscale: float,
) -> Handle[torch.Tensor]:
    """Send each member its share of this rank's tensor. The members add up what they receive, by rank."""
    torch_operation(op)
    members = members_of(process_set)
    with torch.no_grad():
        sent, context = compression.compress(tensor.detach())
    call = _call(sent, name, op, prescale, postscale)

    def launch() -> Handle[torch.Tensor]:
        span = timeline.exchange(call, sent)
        with torch.no_grad():
            own = reducible(sent.contiguous())
            if prescale != 1.0:
                own = own.clone() if own.data_ptr() == tensor.data_ptr() else own
                scale(own, prescale)
        lengths = shares(len(own), members.size)
        mine = lengths[members.index]
        parts = own.new_empty(members.size * mine, *own.shape[1:])
        received = [mine] * members.size
        work = dist.all_to_all_single(parts, own, received, lengths, members.group, async_op=True)

        def finish() -> torch.Tensor:
            total = parts.view(members.size, mine, *own.shape[1:])
            share = total.any(0) if own.dtype is torch.bool else total.sum(0, dtype=own.dtype)
            output = compression.decompress(share, context)
            scale(output, postscale, members.size if op is Op.AVERAGE else 1)
            return output.to(sent.dtype) if output.dtype is torch.int32 else output

        return Handle([work], finish, members.generation, span)

    return matching.start(call, members, launch, waits)


def shares(rows: int, ranks: int) -> list[int]:
    """Return the length of each rank's share of the first dimension."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def _call(sent: torch.Tensor, name: str | None, op: Op, prescale: float, postscale: float) -> Call:
    factors = {"prescale_factor": prescale, "postscale_factor": postscale}
    unusual = {key: factor for key, factor in factors.items() if factor != 1.0}
    line = f"{calls.signature('reducescatter', name, op=op.value, **unusual)} of {calls.form(sent)}"
    wrong = calls.refusal(sent, needs_dimension=True) or refusal(sent.dtype, op)
    if op not in (Op.AVERAGE, Op.SUM):
        wrong = f"op={op.value}: must be Average or Sum"
    return Call(CallKind.OTHER, (line,), wrong=wrong, name=name, is_unique=True)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        compression: type[Compressor],
        op: Op,
        process_set: ProcessSet | None,
        prescale: float,
        postscale: float,
    ) -> torch.Tensor:
        ctx.op, ctx.process_set, ctx.factor = op, process_set, prescale * postscale
        return _start(tensor, name, True, compression, op, process_set, prescale, postscale).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gather the gradients of all shares, because each share depends on all ranks' tensors."""
        with torch.no_grad():
            whole = allgather(gradients[0], process_set=ctx.process_set)
            scale(whole, ctx.factor * (members_of(ctx.process_set).size if ctx.op is Op.SUM else 1))
        return whole, None, None, None, None, None, None
