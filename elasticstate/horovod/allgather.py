"""Allgather: concatenate the tensors, or list the objects, of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from elasticstate.extension import Channel
from elasticstate.horovod import calls, headers, matching, timeline
from elasticstate.horovod.allreduce import allreduce
from elasticstate.horovod.calls import Call, CallKind
from elasticstate.horovod.handles import Handle, together
from elasticstate.horovod.members import Members
from elasticstate.horovod.process_sets import ProcessSet, members_of
from elasticstate.horovod.reduction import Op, raw


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated by rank: ``[sum of first dimensions, ...]``. Gradients flow.

    The gradient is the average over all ranks, as in Horovod. The derivative of the sum over ranks would be the sum.

    Raises UsageError, on all ranks, if the tensors differ in more than their first dimension, or have no dimension.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        gathered: torch.Tensor = cast(Any, _Gather).apply(tensor, name, process_set)
        return gathered
    return _start(tensor, name, members_of(process_set), waits=True)[0].wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Start ``allgather``. One small collective exchanges the sizes before it returns."""
    return _start(tensor, name, members_of(process_set), waits=False)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """Run ``allgather`` on several tensors at once. Return new tensors in the same order. Gradients flow."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        names = calls.names_of_parts(name, len(tensors))
        return [allgather(tensor, part, process_set) for tensor, part in zip(tensors, names, strict=True)]
    return _start_group(tensors, name, process_set, waits=True).wait()


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[torch.Tensor]]:
    """Start ``grouped_allgather``. Small collectives exchange the sizes before it returns."""
    return _start_group(tensors, name, process_set, waits=False)


def start_part(tensor: torch.Tensor, label: str, name: str | None, members: Members) -> Handle[torch.Tensor]:
    """Start the gather of one part of a tensor. ``name``: that of the tensor; None: ``label`` need not be unique."""
    return _start(tensor, label, members, waits=False, is_unique=name is not None)[0]


def _start_group(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet | None, waits: bool
) -> Handle[list[torch.Tensor]]:
    members = members_of(process_set)
    names = calls.names_of_parts(name, len(tensors))
    handles = [_start(tensor, part, members, waits)[0] for tensor, part in zip(tensors, names, strict=True)]
    return together(handles, members.generation)


def _start(
    tensor: torch.Tensor, name: str | None, members: Members, waits: bool, is_unique: bool = True
) -> tuple[Handle[torch.Tensor], list[int]]:
    """Start the gather. Also return a list, which has the first dimension of each member's tensor after the start."""
    lines = (f"{calls.signature('allgather', name)} of {calls.form(tensor, any_length=True)}",)
    wrong = calls.refusal(tensor, needs_dimension=True)
    call = Call(CallKind.OTHER, lines, wrong=wrong, name=name, is_unique=is_unique)
    sizes: list[int] = []
    return matching.start(call, members, lambda: _launch(tensor, call, members, sizes), waits), sizes


def _launch(tensor: torch.Tensor, call: Call, members: Members, sizes: list[int]) -> Handle[torch.Tensor]:
    span = timeline.exchange(call, tensor)
    own = tensor.detach().contiguous()
    sizes += [count for (count,) in Channel(members.group, 0).numbers_of_all([len(own)])]
    output = own.new_empty(sum(sizes), *own.shape[1:])
    parts, most = torch.split(output, sizes), max(sizes)
    if most == 0:
        return Handle([], lambda: output, members.generation, span)
    if min(sizes) == most:
        work = dist.all_gather([raw(part) for part in parts], raw(own), members.group, async_op=True)
        return Handle([work], lambda: output, members.generation, span)
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    rows = [torch.empty_like(padded) for _ in sizes]

    def finish() -> torch.Tensor:
        for part, row in zip(parts, rows, strict=True):
            part.copy_(row[: len(part)])
        return output

    work = dist.all_gather([raw(row) for row in rows], raw(padded), members.group, async_op=True)
    return Handle([work], finish, members.generation, span)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank. They are pickled, so all ranks must trust each other."""
    members = members_of(process_set)
    call = Call(CallKind.OTHER, (calls.signature("allgather_object", name),), name=name)
    headers.agree(call, members)
    sent = cloudpickle.dumps(obj)
    span = timeline.exchange(call, sent_bytes=len(sent))
    received = Channel(members.group, 0).messages_of_all(sent)
    timeline.end(span)
    return [cloudpickle.loads(message) for message in received]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet | None) -> torch.Tensor:
        members = members_of(process_set)
        handle, sizes = _start(tensor, name, members, waits=True)
        ctx.begin, ctx.count, ctx.process_set = sum(sizes[: members.index]), len(tensor), process_set
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = allreduce(gradients[0], op=Op.AVERAGE, process_set=ctx.process_set)
        return whole[ctx.begin : ctx.begin + ctx.count], None, None
