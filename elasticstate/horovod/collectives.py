"""Collectives other than allreduce: allgather, alltoall, barrier, broadcast, reducescatter, and sparse allreduce."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from elasticstate.extension import Channel
from elasticstate.horovod import calls, negotiation, timeline
from elasticstate.horovod.allreduce import (
    Op,
    allreduce,
    differentiable,
    raw,
    reducible,
    reduction,
    scale,
    torch_operation,
)
from elasticstate.horovod.calls import Call, CallKind, CallUsageError, Members
from elasticstate.horovod.compression import Compression, Compressor
from elasticstate.horovod.negotiation import Handle, together
from elasticstate.horovod.world import ProcessSet, members_of

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated by rank: ``[sum of first dimensions, ...]``. Gradients flow.

    The gradient is the average over all ranks, as in Horovod. The derivative of the sum over ranks would be the sum.

    Raises UsageError, on all ranks, if the tensors differ in more than their first dimension, or have no dimension.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        members, shape, sizes = members_of(process_set), tensor.shape, list[int]()

        def backward(gradient: torch.Tensor) -> torch.Tensor:
            whole, begin = allreduce(gradient, op=Op.AVERAGE, process_set=process_set), sum(sizes[: members.index])
            return whole[begin : begin + shape[0]]

        run = functools.partial(_start_allgather, tensor, name, members, True, sizes=sizes)
        return differentiable(tensor, run, backward)
    return _start_allgather(tensor, name, members_of(process_set), waits=True).wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Start ``allgather``. One small collective exchanges the sizes before it returns."""
    return _start_allgather(tensor, name, members_of(process_set), waits=False)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> list[torch.Tensor]:
    """Run ``allgather`` on several tensors at once. Return new tensors in the same order. Gradients flow."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return [allgather(tensor, part, process_set) for tensor, part in calls.named(tensors, name)]
    return _start_group(tensors, name, process_set, waits=True).wait()


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[torch.Tensor]]:
    """Start ``grouped_allgather``. Small collectives exchange the sizes before it returns."""
    return _start_group(tensors, name, process_set, waits=False)


def _start_group(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet | None, waits: bool
) -> Handle[list[torch.Tensor]]:
    members = members_of(process_set)
    handles = [_start_allgather(tensor, part, members, waits) for tensor, part in calls.named(tensors, name)]
    return together(handles, members.generation)


def _start_allgather(
    tensor: torch.Tensor,
    name: str | None,
    members: Members,
    waits: bool,
    is_unique: bool = True,
    sizes: list[int] | None = None,
) -> Handle[torch.Tensor]:
    """Start the gather. ``sizes`` gets the first dimension of each member's tensor."""
    lines = (f"{calls.signature('allgather', name)} of {calls.form(tensor, any_length=True)}",)
    wrong = calls.refusal(tensor, needs_dimension=True)
    call = Call(CallKind.OTHER, lines, wrong=wrong, name=name, is_unique=is_unique)
    into = [] if sizes is None else sizes
    return negotiation.start(call, members, lambda: _launch(tensor, call, members, into), waits)


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
    negotiation.agree(call, members)
    sent = cloudpickle.dumps(obj)
    span = timeline.exchange(call, sent_bytes=len(sent))
    received = Channel(members.group, 0).messages_of_all(sent)
    timeline.end(span)
    return [cloudpickle.loads(message) for message in received]


# ------------------------------------------------------------------------------------------------------------- alltoall
# Alltoall: each rank sends a share of its tensor to each rank. Barrier: all wait for all.


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
    shape, lengths = tensor.shape, list[int]()  # received from each rank

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        output, _ = alltoall(gradient, lengths, process_set=process_set)
        not_sent = output.new_zeros(shape[0] - len(output), *output.shape[1:])
        return torch.cat([output, not_sent])

    run = functools.partial(_start_alltoall, tensor, splits, name, members_of(process_set), True, lengths)
    output, received = differentiable(tensor, run, backward)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Received]:
    """Start ``alltoall``. ``synchronize()`` returns the received tensor and the length received from each rank.

    One small collective exchanges the splits before it returns. No gradient flows through it.
    """
    return _start_alltoall(tensor, splits, name, members_of(process_set), False, [])


def _start_alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None, members: Members, waits: bool, lengths: list[int]
) -> Handle[Received]:
    """Start the exchange. ``lengths`` gets the length received from each member."""
    wrong, given = calls.refusal(tensor, needs_dimension=True), [0] * members.size
    if not wrong:
        try:
            given = _lengths(splits, len(tensor), members.size)
        except (TypeError, ValueError, OverflowError) as error:
            wrong = str(error)
    lines = (f"{calls.signature('alltoall', name)} of {calls.form(tensor, any_length=True)}",)
    call = Call(CallKind.OTHER, lines, wrong=wrong, name=name, is_unique=True)

    def launch() -> Handle[Received]:
        span = timeline.exchange(call, tensor)
        own = tensor.detach()[: sum(given)].contiguous()
        lengths.extend(row[members.index] for row in Channel(members.group, 0).numbers_of_all(given))
        output = own.new_empty(sum(lengths), *own.shape[1:])
        work = dist.all_to_all_single(raw(output), raw(own), lengths, given, members.group, async_op=True)
        template = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
        return Handle([work], lambda: (output, template.new_tensor(lengths)), members.generation, span)

    return negotiation.start(call, members, launch, waits)


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


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until all ranks have called this."""
    # The header waits for all.
    negotiation.agree(Call(CallKind.BARRIER, ("barrier()",)), members_of(process_set))


# ------------------------------------------------------------------------------------------------------------ broadcast
# Broadcast of a tensor or an object from one rank to all.


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Return a new tensor: that of ``root_rank``. Shape and dtype are equal on all ranks. Gradients flow to the root's.

    The gradient is the average over all ranks, as in Horovod. The derivative of the sum over ranks would be the sum.

    Raises UsageError, on all ranks, if there is no such rank, or roots, dtypes or shapes differ.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:

        def backward(gradient: torch.Tensor) -> torch.Tensor:
            members, whole = members_of(process_set), allreduce(gradient, op=Op.AVERAGE, process_set=process_set)
            return whole if members.ranks[members.index] == root_rank else torch.zeros_like(whole)

        run = functools.partial(_start_broadcast, tensor, False, root_rank, name, process_set, True)
        return differentiable(tensor, run, backward)
    return _start_broadcast(tensor, False, root_rank, name, process_set, waits=True).wait()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Start ``broadcast``. ``synchronize()`` returns the new tensor."""
    return _start_broadcast(tensor, False, root_rank, name, process_set, waits=False)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> torch.Tensor:
    """Run ``broadcast`` into ``tensor``, and return ``tensor``."""
    return _start_broadcast(tensor, True, root_rank, name, process_set, waits=True).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[torch.Tensor]:
    """Start ``broadcast_``. Do not use ``tensor`` until ``synchronize()`` returns it."""
    return _start_broadcast(tensor, True, root_rank, name, process_set, waits=False)


def _start_broadcast(
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

    return negotiation.start(call, members, launch, waits)


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
    negotiation.agree(call, members)
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


# -------------------------------------------------------------------------------------------------------- reducescatter
# Reducescatter: reduce the tensors of all ranks to one, and give each rank a share of it.


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's share of the average (or sum) of ``tensor`` over all ranks.

    Shape and dtype are equal on all ranks. The first dimension is divided by rank. If it cannot be divided evenly, the
    first ranks get one row more. Gradients flow. With Sum, the gradient is multiplied by size(), as in Horovod.

    ``op``: Average or Sum. The other arguments and the errors are those of ``allreduce``.
    """
    arguments = compression, op, process_set, prescale_factor, postscale_factor
    if torch.is_grad_enabled() and tensor.requires_grad:

        @torch.no_grad()
        def backward(gradient: torch.Tensor) -> torch.Tensor:
            """Gather the gradients of all shares, because each share depends on all ranks' tensors."""
            whole = allgather(gradient, process_set=process_set)
            factor = prescale_factor * postscale_factor
            scale(whole, factor * (members_of(process_set).size if op is Op.SUM else 1))
            return whole

        run = functools.partial(_start_reducescatter, tensor, name, True, *arguments)
        return differentiable(tensor, run, backward)
    return _start_reducescatter(tensor, name, True, *arguments).wait()


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start ``reducescatter``. ``synchronize()`` returns the share. No gradient flows through it."""
    return _start_reducescatter(
        tensor, name, False, Compression.none, op, process_set, prescale_factor, postscale_factor
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run ``reducescatter`` on several tensors at once. Return the shares in the same order. Gradients flow."""
    arguments = compression, op, process_set, prescale_factor, postscale_factor
    named = calls.named(tensors, name)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return [reducescatter(tensor, part, *arguments) for tensor, part in named]
    handles = [_start_reducescatter(tensor, part, True, *arguments) for tensor, part in named]
    return [handle.wait() for handle in handles]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Start ``grouped_reducescatter``. ``synchronize()`` returns the shares. No gradient flows through them."""
    arguments = op, process_set, prescale_factor, postscale_factor
    handles = [reducescatter_async(tensor, part, *arguments) for tensor, part in calls.named(tensors, name)]
    return together(handles, members_of(process_set).generation)


def _start_reducescatter(
    tensor: torch.Tensor,
    name: str | None,
    waits: bool,
    compression: type[Compressor],
    op: Op,
    process_set: ProcessSet | None,
    prescale: float,
    postscale: float,
) -> Handle[torch.Tensor]:
    """Send each member its share of this rank's tensor. The members add up what they receive, by rank."""
    torch_operation(op)
    members = members_of(process_set)
    with torch.no_grad():
        sent, context = compression.compress(tensor.detach())
    wrong = calls.refusal(sent, needs_dimension=True)
    if op not in (Op.AVERAGE, Op.SUM):
        wrong = f"op={op.value}: must be Average or Sum"
    line, wrong = reduction("reducescatter", sent, name, op, prescale, postscale, wrong)
    call = Call(CallKind.OTHER, (line,), wrong=wrong, name=name, is_unique=True)

    def launch() -> Handle[torch.Tensor]:
        span = timeline.exchange(call, sent)
        with torch.no_grad():
            own = reducible(sent.contiguous())
            if prescale != 1.0:
                own = own.clone() if own.data_ptr() == tensor.data_ptr() else own
                scale(own, prescale)
        lengths = shares(len(own), members.size)
        mine = lengths[members.index]
        parts = own.new_empty(members.size * mine, *own.shape[1:])
        received = [mine] * members.size
        work = dist.all_to_all_single(parts, own, received, lengths, members.group, async_op=True)

        def finish() -> torch.Tensor:
            total = parts.view(members.size, mine, *own.shape[1:])
            share = total.any(0) if own.dtype is torch.bool else total.sum(0, dtype=own.dtype)
            output = compression.decompress(share, context)
            scale(output, postscale, members.size if op is Op.AVERAGE else 1)
            return output.to(sent.dtype) if output.dtype is torch.int32 else output

        return Handle([work], finish, members.generation, span)

    return negotiation.start(call, members, launch, waits)


def shares(rows: int, ranks: int) -> list[int]:
    """Return the length of each rank's share of the first dimension."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


# --------------------------------------------------------------------------------------------------------------- sparse
# Allreduce of sparse tensors: the entries of all ranks are gathered.


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

    ``tensor``: ``sparse_coo``, with the same shape and dtype on all ranks. ``op``: Average or Sum.

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
    start = functools.partial(_start_allgather, members=members, waits=False, is_unique=name is not None)
    indices = start(own._indices().t().contiguous(), f"{label}.indices of {list(own.shape)}")
    values = start(own._values(), f"{label}.values")

    def finish() -> torch.Tensor:
        found = values.wait()
        if op is Op.AVERAGE:
            found = found / members.size
        return torch.sparse_coo_tensor(
            indices.wait().t(), found, tensor.shape, check_invariants=True, device=found.device
        )

    return SparseHandle((), finish, members.generation, parts=(indices, values))
