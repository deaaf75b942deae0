"""Reduction operations, and scaling of tensors."""

from __future__ import annotations

from enum import Enum

import torch
import torch.distributed as dist

from elasticstate.horovod.failures import CallUsageError


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
