"""``join()``: a rank that has run out of batches does what the others do, with nothing of its own, until all have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from elasticstate.errors import UsageError
from elasticstate.horovod import headers, world
from elasticstate.horovod.headers import Header, Kind
from elasticstate.horovod.reducer import reducer_of
from elasticstate.horovod.reduction import Op, of_torch


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; returns the rank of the last one (the highest, if there are several).

    Meanwhile this rank takes part in the others' steps and allreduces: with zeros, so an average is still one over
    size() ranks. It ends their ticks with them. In ``elastic.run`` all have the state of the last rank then, and one
    more tick has ended. ``device`` is not looked at.

    Call it right behind the loop over batches, before a commit that belongs to the end of the epoch.

    Raises:
        UsageError: this rank has ended more ticks than the others; or they do what cannot be done without it
            (broadcast, allgather, alltoall), which raises it there, too.
        What a collective raises, and what ends a tick: ``elastic.run`` deals with both.
    """
    world.ready()
    if world.size() == 1:
        return 0
    is_last = True
    while (header := headers.receive()) is not None:
        is_last = False
        _end_ticks_up_to(header.ticks)
        _take_part(header)
    most = torch.tensor([world.rank() if is_last else -1, headers.ticks()])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    last, ticks = most.tolist()
    _end_ticks_up_to(ticks)
    state = headers.state()
    if state is not None:
        state.join_hook().post_hook(is_last)
    return int(last)


def _end_ticks_up_to(ticks: int) -> None:
    """Those that the others have ended before they could know that this rank has joined."""
    ahead = headers.ticks() - ticks
    if ahead > 0:
        raise UsageError(
            f"join(): this rank has ended {ahead} tick(s) more than those that still train: call join() before "
            f"commit(), save() or check_host_updates() at the end of an epoch"
        )
    for _ in range(-ahead):
        _end_tick()


def _end_tick() -> None:
    state = headers.state()
    if state is not None:
        state.join_hook().main_hook()


def _take_part(header: Header) -> None:
    if header.kind is Kind.STEP:
        reducer_of(header.numbers[0]).take_part()
    elif header.kind is Kind.TICK:
        _end_tick()
    elif header.kind is Kind.BARRIER:
        dist.barrier()
    elif header.kind is Kind.ALLREDUCE:
        op, elements, dtype = header.numbers
        nothing = _nothing(headers.OPS[op], elements, headers.DTYPES[dtype])
        dist.all_reduce(nothing, of_torch(headers.OPS[op]))
    else:
        raise UsageError(
            "join(): other ranks do what takes all ranks: only allreduce, barrier and optimizers' steps go"
        )


def _nothing(op: Op, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What changes nothing."""
    if op in (Op.MIN, Op.MAX):
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        return torch.full((elements,), limits.max if op is Op.MIN else limits.min, dtype=dtype)
    return torch.full((elements,), 1 if op is Op.PRODUCT else 0, dtype=dtype)
