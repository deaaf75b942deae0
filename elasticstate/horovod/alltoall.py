"""Alltoall: each rank sends a share of its tensor to each rank. Barrier: all wait for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from elasticstate.extension import Channel
from elasticstate.horovod import calls, headers, matching, timeline
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.handles import Handle
from elasticstate.horovod.members import Members
from elasticstate.horovod.process_sets import ProcessSet, members_of
from elasticstate.horovod.reduction import raw

Received = tuple[torch.Tensor, torch.Tensor]
Splits = torch.Tensor | Sequence[int] | None


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor | Received:
    """Send each rank a share of the first dimension, and receive one share from each, in the order of ranks.

    Args:
        splits: length of each rank's share: size() numbers that add up to the first dimension; if they add up to less,
            the last rows are not sent. None, or nothing in it: equal shares.
        process_set: ranks that take part; None: all.

    Returns the received tensor; with ``splits`` also the length received from each rank, with the dtype of ``splits``
    (``int32[size]`` for a list). Gradients flow back to the ranks that sent the shares.

    Raises UsageError, on all ranks, if the splits do not fit, or tensors differ in more than their first dimension.
    """
    output, received = cast(Received, cast(Any, _Alltoall).apply(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Received]:
    """Start ``alltoall``. ``synchronize()`` returns the received tensor and the length received from each rank.

    One small collective exchanges the splits before it returns. No gradient flows through it.
    """
    return _start(tensor, splits, name, members_of(process_set), waits=False)[0]


def _start(
    tensor: torch.Tensor, splits: Splits, name: str | None, members: Members, waits: bool
) -> tuple[Handle[Received], list[int]]:
    """Start the exchange. Also return a list, which has the length received from each member after the start."""
    wrong, given = calls.refusal(tensor, needs_dimension=True), [0] * members.size
    if not wrong:
        try:
            given = _lengths(splits, len(tensor), members.size)
        except (TypeError, ValueError, OverflowError) as error:
            wrong = str(error)
    lines = (f"{calls.signature('alltoall', name)} of {calls.form(tensor, any_length=True)}",)
    call = Call(CallKind.OTHER, lines, wrong=wrong, name=name, is_unique=True)
    lengths: list[int] = []

    def launch() -> Handle[Received]:
        span = timeline.exchange(call, tensor)
        own = tensor.detach()[: sum(given)].contiguous()
        lengths.extend(row[members.index] for row in Channel(members.group, 0).numbers_of_all(given))
        output = own.new_empty(sum(lengths), *own.shape[1:])
        work = dist.all_to_all_single(raw(output), raw(own), lengths, given, members.group, async_op=True)
        template = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
        return Handle([work], lambda: (output, template.new_tensor(lengths)), members.generation, span)

    return matching.start(call, members, launch, waits), lengths


def _lengths(splits: Splits, rows: int, ranks: int) -> list[int]:
    """Return the length of each rank's share of ``rows``. Raises an error if ``splits`` cannot be those lengths."""
    if splits is None or len(splits) == 0:
        if rows % ranks:
            raise ValueError(
                f"the first dimension, {rows}, is not a multiple of the {ranks} ranks: pass splits that add up to the "
                "first dimension"
            )
        return [rows // ranks] * ranks
    if isinstance(splits, torch.Tensor):
        has_integers = not (splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool)
        if splits.dim() != 1 or not has_integers:
            raise ValueError(f"splits={calls.form(splits)}: must have one dimension and integers, as int32[{ranks}]")
    given = [int(length) for length in (splits.tolist() if isinstance(splits, torch.Tensor) else splits)]
    if len(given) != ranks or min(given) < 0 or sum(given) > rows:
        raise ValueError(f"splits={given} must be {ranks} numbers that add up to the first dimension, {rows}, or less")
    return given


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet | None
    ) -> Received:
        handle, ctx.lengths = _start(tensor, splits, name, members_of(process_set), waits=True)
        ctx.process_set, ctx.rows = process_set, len(tensor)
        output, received = handle.wait()
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        output, _ = alltoall(gradients[0], ctx.lengths, process_set=ctx.process_set)
        not_sent = output.new_zeros(ctx.rows - len(output), *output.shape[1:])
        return torch.cat([output, not_sent]), None, None, None


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until all ranks have called this."""
    # The header waits for all.
    headers.agree(Call(CallKind.BARRIER, ("barrier()",)), members_of(process_set))
