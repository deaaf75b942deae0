"""Allreduce: reduce the tensors of all ranks to one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from elasticstate.horovod import calls, negotiation, timeline
from elasticstate.horovod.calls import Call, CallKind, CallUsageError
from elasticstate.horovod.compression import Compression, Compressor
from elasticstate.horovod.negotiation import Handle, together
from elasticstate.horovod.world import ProcessSet, members_of

T = TypeVar("T")


class Op(Enum):
    """Operation that reduces the tensors of all ranks to one."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    ADASUM = "Adasum"


_TORCH_OPERATIONS = {
    Op.AVERAGE: dist.ReduceOp.SUM,  # followed by a division, because Gloo has no average
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}


OPS = tuple(Op)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def reducible(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in a dtype that the backends reduce: int16 as int32, with the same result modulo 2**16."""
    return tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view for sending: of int16, which Gloo does not know, the bytes as ``uint8[..., 2]``."""
    return tensor.unsqueeze(-1).view(torch.uint8) if tensor.dtype is torch.int16 else tensor


def refusal(dtype: torch.dtype, op: Op) -> str:
    """Return the reason why tensors of this dtype cannot be reduced by ``op``; "" if they can."""
    if dtype not in DTYPES:
        return f"the dtype must be one of {', '.join(str(known).removeprefix('torch.') for known in DTYPES)}"
    if dtype is torch.bool and op is Op.AVERAGE:
        return "there is no average of bool: pass op=Sum (or), op=Min (and), or another dtype"
    if dtype.is_complex and op in (Op.MIN, Op.MAX, Op.PRODUCT):
        return f"{op.value} of complex numbers is not available: pass op=Sum or op=Average"
    return ""


def torch_operation(op: Op) -> dist.ReduceOp.RedOpType:
    """Return torch's operation for ``op``. Raises UsageError if there is none."""
    if op is Op.ADASUM:
        raise CallUsageError(
            "op=Adasum: elasticstate.horovod has no Adasum. Use Average or Sum, and adapt the learning rate."
        )
    if op not in _TORCH_OPERATIONS:
        raise CallUsageError(f"op={op!r}: must be Average, Sum, Min, Max or Product")
    return _TORCH_OPERATIONS[op]


def operation(average: bool | None, op: Op | None) -> Op:
    """Return the operation from Horovod's newer (``op``) or older argument (``average``); default: Average.

    Raises UsageError if both are given.
    """
    if average is not None and op is not None:
        raise CallUsageError("average and op exclude each other, because both select the operation. Pass op alone.")
    if op is not None:
        return op
    return Op.SUM if average is False else Op.AVERAGE


def scale(tensor: torch.Tensor, factor: float, divisor: int = 1) -> None:
    """Multiply by ``factor / divisor``, in place. Integers are rounded once, towards zero, as in Horovod."""
    if tensor.is_floating_point() or tensor.is_complex():
        if divisor != 1:
            tensor.div_(divisor)
        if factor != 1.0:
            tensor.mul_(factor)
    elif factor != 1.0:
        tensor.copy_(tensor.double().mul_(factor / divisor))
    elif divisor != 1:
        tensor.div_(divisor, rounding_mode="trunc")


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """Return a new tensor: the average (or ``op``) of ``tensor`` over all ranks.

    Shape and dtype are equal on all ranks. Gradients flow through Average and Sum. Averages of integers are rounded
    towards zero.

    Args:
        average: older spelling: True is ``op=Average``, False is ``op=Sum``.
        name: equal on all ranks; shown in errors.
        compression: compressor for the tensor that is sent.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: factors before and after the reduction.
        process_set: ranks that take part; None: all.

    Raises UsageError, on all ranks, if their tensors or arguments differ or are invalid, and torch's error if a peer
    dies.
    """
    op = operation(average, op)
    arguments = None, op, prescale_factor, postscale_factor, process_set, compression
    if torch.is_grad_enabled() and tensor.requires_grad:
        if op not in (Op.AVERAGE, Op.SUM):
            raise CallUsageError(
                f"op={op.value}: no gradient flows through this operation. Call detach() on the tensor, or use Average "
                "or Sum."
            )
        # Each rank's tensor is in each rank's output, so its gradient is reduced like the tensor.
        run = functools.partial(_start, tensor, name, False, True, *arguments)
        return differentiable(tensor, run, lambda gradient: _start(gradient, None, False, True, *arguments).wait())
    return _start(tensor, name, False, True, *arguments).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle[torch.Tensor]:
    """Start ``allreduce``. ``synchronize()`` returns the new tensor. No gradient flows through it.

    Like all asynchronous calls, it first compares the calls of all ranks, so it returns after all ranks have made the
    call. With a name, it also returns when the others make another call first, and starts when they have made this one.
    """
    return _start(tensor, name, False, False, average, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """Run ``allreduce`` in place, and return ``tensor``."""
    return _start(tensor, name, True, True, average, op, prescale_factor, postscale_factor, process_set).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle[torch.Tensor]:
    """Start ``allreduce_``. Do not use ``tensor`` until ``synchronize()`` returns it."""
    return _start(tensor, name, True, False, average, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """Run ``allreduce`` on several tensors at once. Return new tensors in the same order."""
    arguments = op, prescale_factor, postscale_factor, process_set
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return [allreduce(t, average, part, compression, *arguments) for t, part in calls.named(tensors, name)]
    return _start_group(tensors, name, False, True, average, *arguments, compression).wait()


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle[list[torch.Tensor]]:
    """Start ``grouped_allreduce``. ``synchronize()`` returns the new tensors. No gradient flows through them."""
    return _start_group(tensors, name, False, False, average, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[torch.Tensor]:
    """Run ``grouped_allreduce`` in place, and return ``tensors``."""
    return _start_group(tensors, name, True, True, average, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Handle[list[torch.Tensor]]:
    """Start ``grouped_allreduce_``. Do not use ``tensors`` until ``synchronize()`` returns them."""
    return _start_group(tensors, name, True, False, average, op, prescale_factor, postscale_factor, process_set)


def _start_group(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    in_place: bool,
    waits: bool,
    average: bool | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet | None,
    compression: type[Compressor] = Compression.none,
) -> Handle[list[torch.Tensor]]:
    generation = members_of(process_set).generation
    arguments = in_place, waits, average, op, prescale, postscale, process_set, compression
    return together([_start(t, part, *arguments) for t, part in calls.named(tensors, name)], generation)


def differentiable(
    tensor: torch.Tensor, run: Callable[[], Handle[T]], backward: Callable[[torch.Tensor], torch.Tensor]
) -> T:
    """Run a collective on ``tensor``, and return its output. ``backward`` returns the gradient for that of the output.

    ``backward`` must not keep ``tensor``, whose memory the script may need.
    """
    output: T = cast(Any, _Differentiable).apply(tensor, run, backward)
    return output


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, run: Any, backward: Any) -> Any:
        ctx.of_output = backward
        return run().wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.of_output(gradients[0]), None, None


def _start(
    tensor: torch.Tensor,
    name: str | None,
    in_place: bool,
    waits: bool,
    average: bool | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet | None,
    compression: type[Compressor] = Compression.none,
) -> Handle[torch.Tensor]:
    op = operation(average, op)
    reduce_op = torch_operation(op)
    members = members_of(process_set)
    with torch.no_grad():
        compressed, context = compression.compress(tensor.detach())
    line, wrong = reduction("allreduce", compressed, name, op, prescale, postscale, calls.refusal(compressed))
    numbers = () if wrong else (OPS.index(op), compressed.numel(), DTYPES.index(compressed.dtype))
    call = Call(CallKind.ALLREDUCE, (line,), numbers, wrong, name, is_unique=True)

    def launch() -> Handle[torch.Tensor]:
        span = timeline.exchange(call, compressed)
        with torch.no_grad():
            sent = reducible(compressed.contiguous())
            if not in_place and sent.data_ptr() == tensor.data_ptr():
                sent = sent.clone()
            scale(sent, prescale)
        work = dist.all_reduce(sent, reduce_op, members.group, async_op=True)

        def finish() -> torch.Tensor:
            output = compression.decompress(sent, context)
            scale(output, postscale, members.size if op is Op.AVERAGE else 1)
            output = output.to(compressed.dtype) if output.dtype is torch.int32 else output
            if not in_place:
                return output
            if output.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(output)
            return tensor

        return Handle([work], finish, members.generation, span)

    return negotiation.start(call, members, launch, waits)


def reduction(
    function: str, sent: torch.Tensor, name: str | None, op: Op, prescale: float, postscale: float, wrong: str
) -> tuple[str, str]:
    """Return the line of the call, and the reason why it cannot be made; "" if it can. ``wrong``: a reason that counts
    more than the dtype."""
    factors = {"prescale_factor": prescale, "postscale_factor": postscale}
    unusual = {key: factor for key, factor in factors.items() if factor != 1.0}
    line = f"{calls.signature(function, name, op=op.value, **unusual)} of {calls.form(sent)}"
    return line, wrong or refusal(sent.dtype, op)
