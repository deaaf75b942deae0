"""The collectives and the functions of a world, as in ``horovod.torch.mpi_ops``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from elasticstate.errors import CollectiveError as HorovodInternalError
from elasticstate.horovod import collectives, negotiation, world
from elasticstate.horovod.allreduce import (
    DTYPES,
    OPS,
    Op,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    reducible,
    torch_operation,
)
from elasticstate.horovod.calls import CallKind, CallUsageError, failures_named
from elasticstate.horovod.collectives import *  # noqa: F403
from elasticstate.horovod.compression import Compression
from elasticstate.horovod.negotiation import CallHeader, poll, synchronize
from elasticstate.horovod.optimizer import reducer_of
from elasticstate.horovod.world import *  # noqa: F403

Average, Sum, Min, Max, Product, Adasum = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT, Op.ADASUM

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "join",
    "poll",
    "synchronize",
]
__all__ += collectives.__all__
__all__ += world.__all__


def join(device: int = -1) -> int:
    """Wait until all ranks have called this. Return the rank of the last one (the highest, if there are several).

    Meanwhile this rank takes part in the others' steps and allreduces, with zeros. So an average is still one over
    size() ranks. It ends its ticks together with them. In ``elastic.run``, all ranks then receive the state of the last
    rank, and one more tick ends. ``device`` is ignored.

    Call it directly after the loop over batches, before a commit that belongs to the end of the epoch.

    The errors of a collective, and the exceptions that end a tick, pass through. ``elastic.run`` handles both.

    Raises:
        UsageError: there are process sets; this rank has ended more ticks than the others; or they step an optimizer
            that it does not have. If the others make a call that needs all ranks (broadcast, allgather, alltoall), or
            different calls, only they raise an error, and this rank waits on.
    """
    if world.has_sets():
        raise CallUsageError("join() does not work with process sets. Remove them first: hvd.remove_process_set().")
    members = world.members_of(None)
    if members.size == 1:
        return 0
    for late in list(members.earlier.values()):
        late.wait_for_start()
    is_last = True
    while (header := negotiation.receive(members)) is not None:
        is_last = False
        if not header.fails:
            _end_ticks_up_to(header.ticks)
            _take_part(header)
    most = torch.tensor([members.index if is_last else -1, negotiation.ticks()], device="cpu")
    with failures_named():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    last, ticks = most.tolist()
    _end_ticks_up_to(ticks)
    state = negotiation.state()
    if state is not None:
        state.join_hook().post_hook(is_last)
    return int(last)


def _end_ticks_up_to(ticks: int) -> None:
    """End the ticks that the others ended before they received the news that this rank has joined."""
    ahead = negotiation.ticks() - ticks
    if ahead > 0:
        raise CallUsageError(
            f"join(): this rank has completed {ahead} tick(s) more than the ranks that still train. Call join() before "
            f"the commit(), save() or check_host_updates() at the end of an epoch."
        )
    for _ in range(-ahead):
        _end_tick()


def _end_tick() -> None:
    state = negotiation.state()
    if state is not None:
        state.join_hook().main_hook()


def _take_part(header: CallHeader) -> None:
    if header.kind == CallKind.STEP:
        reducer_of(header.digest).take_part()
    elif header.kind == CallKind.TICK:
        _end_tick()
    elif header.kind == CallKind.ALLREDUCE:
        op, elements, dtype = header.numbers
        nothing = reducible(_nothing(OPS[op], elements, DTYPES[dtype]))
        with failures_named():
            dist.all_reduce(nothing, torch_operation(OPS[op]))


def _nothing(op: Op, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that does not change the result of ``op``."""
    if op in (Op.MIN, Op.MAX):
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        return torch.full((elements,), limits.max if op is Op.MIN else limits.min, dtype=dtype, device="cpu")
    return torch.full((elements,), 1 if op is Op.PRODUCT else 0, dtype=dtype, device="cpu")
