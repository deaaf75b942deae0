"""Broadcast of a tensor or an object from one rank to all."""

from __future__ import annotations

from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from elasticstate.extension import Channel
from elasticstate.horovod import calls, headers, matching, timeline
from elasticstate.horovod.allreduce import allreduce
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.handles import Handle
from elasticstate.horovod.members import Members
from elasticstate.horovod.process_sets import ProcessSet, members_of
from elasticstate.horovod.reduction import Op, raw


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Return a new tensor: that of ``root_rank``. Shape and dtype are equal on all ranks. Gradients flow to the root's.

    The gradient is the average over all ranks, as in Horovod. The derivative of the sum over ranks would be the sum.

    Raises UsageError, on all ranks, if there is no such rank, or roots, dtypes or shapes differ.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        received: torch.Tensor = cast(Any, _Broadcast).apply(tensor, root_rank, name, process_set)
        return received
    return _start(tensor, False, root_rank, name, process_set, waits=True).wait()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Start ``broadcast``. ``synchronize()`` returns the new tensor."""
    return _start(tensor, False, root_rank, name, process_set, waits=False)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Run ``broadcast`` into ``tensor``, and return ``tensor``."""
    return _start(tensor, True, root_rank, name, process_set, waits=True).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Start ``broadcast_``. Do not use ``tensor`` until ``synchronize()`` returns it."""
    return _start(tensor, True, root_rank, name, process_set, waits=False)


def _start(
    tensor: torch.Tensor,
    in_place: bool,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet | None,
    waits: bool,
) -> Handle[torch.Tensor]:
    members = members_of(process_set)
    line = f"{calls.signature('broadcast', name, root_rank=root_rank)} of {calls.form(tensor)}"
    wrong = refusal_of_root(root_rank, members) or calls.refusal(tensor)
    call = Call(CallKind.OTHER, (line,), wrong=wrong, name=name, is_unique=True)

    def launch() -> Handle[torch.Tensor]:
        target = tensor if in_place else tensor.detach().clone(memory_format=torch.contiguous_format)
        return start_broadcast(target, root_rank, members, timeline.exchange(call, target))

    return matching.start(call, members, launch, waits)


def start_broadcast(
    target: torch.Tensor, root_rank: int, members: Members, span: timeline.Span | None
) -> Handle[torch.Tensor]:
    """Start a broadcast into ``target``, whose form all ranks have agreed on."""
    sent = target.detach().contiguous()
    work = dist.broadcast(raw(sent), root_rank, members.group, async_op=True)

    def finish() -> torch.Tensor:
        if sent.data_ptr() != target.data_ptr():
            target.detach().copy_(sent)
        return target

    return Handle([work], finish, members.generation, span)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the object of ``root_rank``. ``obj`` of other ranks is ignored.

    The object is pickled, so all ranks must trust the root.

    Raises UsageError, on all ranks, if there is no such rank, or roots differ.
    """
    members = members_of(process_set)
    line = calls.signature("broadcast_object", name, root_rank=root_rank)
    call = Call(CallKind.OTHER, (line,), wrong=refusal_of_root(root_rank, members), name=name)
    headers.agree(call, members)
    channel = Channel(members.group, members.ranks.index(root_rank))
    sends = members.ranks[members.index] == root_rank
    sent = cloudpickle.dumps(obj) if sends else b""
    span = timeline.exchange(call, sent_bytes=len(sent))
    if sends:
        channel.send(sent)
    received = obj if sends else cloudpickle.loads(channel.receive())
    timeline.end(span)
    return received


def refusal_of_root(root_rank: int, members: Members) -> str:
    """Return the reason why ``root_rank`` cannot be a root; "" if it can."""
    if root_rank in members.ranks:
        return ""
    if members.calls is None:
        return f"root_rank must be a rank of the world, 0 to {members.size - 1}"
    return f"root_rank must be a rank of the process set, one of {list(members.ranks)}"


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet | None
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return _start(tensor, False, root_rank, name, process_set, waits=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = allreduce(gradients[0], op=Op.AVERAGE, process_set=ctx.process_set)
        members = members_of(ctx.process_set)
        is_root = members.ranks[members.index] == ctx.root_rank
        return (gradient if is_root else torch.zeros_like(gradient)), None, None, None
