"""Allreduce of sparse tensors: the entries of all ranks are gathered."""

from __future__ import annotations

import torch

from elasticstate.errors import UsageError
from elasticstate.horovod.allgather import allgather_async
from elasticstate.horovod.handles import Handle
from elasticstate.horovod.process_sets import ProcessSet, members_of
from elasticstate.horovod.reduction import Op


class SparseHandle(Handle[torch.Tensor]):
    """Handle of ``sparse_allreduce_async``. As in Horovod, a call of it waits for the tensor, too."""

    def __call__(self) -> torch.Tensor:
        return self.wait()


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: Op = Op.AVERAGE, process_set: ProcessSet | None = None
) -> SparseHandle:
    """Start the average (or sum) of sparse tensors. ``synchronize()`` returns the sparse tensor, not coalesced.

    The number of entries may differ between ranks. The time grows with the entries of all ranks, so ``to_dense()`` and
    ``allreduce`` are faster if most rows have entries.

    Args:
        tensor: ``sparse_coo``, with the same shape and dtype on all ranks.
        op: Average or Sum.
        process_set: ranks that take part; None: all.

    Raises UsageError for a tensor of another layout or another ``op``; on all ranks, if dtypes or shapes differ.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(
            "sparse_allreduce_async: the tensor must be sparse_coo. Use allreduce_async for a dense tensor."
        )
    if op not in (Op.AVERAGE, Op.SUM):
        raise UsageError(f"sparse_allreduce_async: op={op.value}: must be Average or Sum")
    members = members_of(process_set)
    label = name if name is not None else "sparse"
    own = tensor.detach()
    indices = allgather_async(own._indices().t().contiguous(), f"{label}.indices of {list(own.shape)}", process_set)
    values = allgather_async(own._values(), f"{label}.values", process_set)

    def finish() -> torch.Tensor:
        found = values.wait()
        if op is Op.AVERAGE:
            found = found / members.size
        return torch.sparse_coo_tensor(indices.wait().t(), found, tensor.shape, check_invariants=True)

    return SparseHandle([*indices.works, *values.works], finish, members.generation)
