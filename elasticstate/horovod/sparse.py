"""Allreduce of sparse tensors and sparse gradients: the entries of all ranks are gathered."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from elasticstate.horovod.allgather import start_part
from elasticstate.horovod.failures import CallUsageError
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
        raise CallUsageError(
            "sparse_allreduce_async: the tensor must be sparse_coo. Use allreduce_async for a dense tensor."
        )
    if op not in (Op.AVERAGE, Op.SUM):
        raise CallUsageError(f"sparse_allreduce_async: op={op.value}: must be Average or Sum")
    members = members_of(process_set)
    label = name if name is not None else "sparse"
    own = tensor.detach()
    indices = start_part(own._indices().t().contiguous(), f"{label}.indices of {list(own.shape)}", name, members)
    values = start_part(own._values(), f"{label}.values", name, members)

    def finish() -> torch.Tensor:
        found = values.wait()
        if op is Op.AVERAGE:
            found = found / members.size
        return torch.sparse_coo_tensor(indices.wait().t(), found, tensor.shape, check_invariants=True)

    return SparseHandle((), finish, members.generation, parts=(indices, values))


class SparseGradients:
    """The parameters of one optimizer whose gradients are sparse, such as those of ``nn.Embedding(sparse=True)``.

    They have no buckets, and are reduced in ``synchronize``.
    """

    def __init__(self, op: Op, process_set: ProcessSet | None) -> None:
        self._op = op
        self._process_set = process_set
        self._parameters: dict[int, tuple[torch.Tensor, int]] = {}  # id -> parameter, number of sparse dimensions

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter, _ in self._parameters.values())

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._parameters

    def add(self, parameter: torch.Tensor) -> None:
        """Add a parameter that has its first sparse gradient now."""
        assert parameter.grad is not None
        self._parameters[id(parameter)] = parameter, parameter.grad.sparse_dim()

    def reduce(self) -> None:
        """Replace the gradients by those of all ranks. A missing gradient counts as zeros.

        Raises UsageError, on all ranks, if some of them are in ``join()``, and the errors of a collective.
        """
        started = [
            (
                parameter,
                sparse_allreduce_async(_gradient(parameter, dimensions), None, self._op, self._process_set),
            )
            for parameter, dimensions in self._parameters.values()
        ]
        for parameter, handle in started:
            parameter.grad = handle.wait().coalesce()


def _gradient(parameter: torch.Tensor, dimensions: int) -> torch.Tensor:
    if parameter.grad is None:
        indices = torch.empty(dimensions, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty(0, *parameter.shape[dimensions:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
    return parameter.grad.to_sparse(dimensions) if parameter.grad.layout is torch.strided else parameter.grad
