"""Reduction operations, and scaling of tensors."""

from __future__ import annotations

from enum import Enum

import torch
import torch.distributed as dist

from elasticstate.errors import UsageError


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


def torch_operation(op: Op) -> dist.ReduceOp.RedOpType:
    """Return torch's operation for ``op``. Raises UsageError if there is none."""
    if op is Op.ADASUM:
        raise UsageError(
            "op=Adasum: elasticstate.horovod has no Adasum. Use Average or Sum, and adapt the learning rate."
        )
    if op not in _TORCH_OPERATIONS:
        raise UsageError(f"op={op!r}: must be Average, Sum, Min, Max or Product")
    return _TORCH_OPERATIONS[op]


def operation(average: bool | None, op: Op | None) -> Op:
    """Return the operation from Horovod's newer (``op``) or older argument (``average``); default: Average.

    Raises UsageError if both are given.
    """
    if average is not None and op is not None:
        raise UsageError("average and op exclude each other, because both select the operation. Pass op alone.")
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
