"""By which operation tensors are reduced, and how they are scaled."""

from __future__ import annotations

from enum import Enum

import torch
import torch.distributed as dist

from elasticstate.errors import UsageError


class Op(Enum):
    """How the tensors of all ranks become one."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"
    ADASUM = "Adasum"


_OF_TORCH = {
    Op.AVERAGE: dist.ReduceOp.SUM,  # and a division: Gloo has no average
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}


def of_torch(op: Op) -> dist.ReduceOp.RedOpType:
    """Raises UsageError for what cannot be done."""
    if op is Op.ADASUM:
        raise UsageError("Adasum is not there: use Average or Sum, and scale the learning rate for them")
    if op not in _OF_TORCH:
        raise UsageError(f"op={op!r}: takes Average, Sum, Min, Max or Product")
    return _OF_TORCH[op]


def chosen(average: bool | None, op: Op | None) -> Op:
    """Of Horovod's newer spelling (``op``) and its older one (``average``). UsageError if both are given."""
    if average is not None and op is not None:
        raise UsageError("average and op are two spellings of the same: give op alone")
    if op is not None:
        return op
    return Op.SUM if average is False else Op.AVERAGE


def divide(tensor: torch.Tensor, n: int) -> None:
    """In place; integers are rounded down."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(n)
    else:
        tensor.div_(n, rounding_mode="floor")


def scale(tensor: torch.Tensor, factor: float) -> None:
    """In place; integers lose what is behind the point."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))
