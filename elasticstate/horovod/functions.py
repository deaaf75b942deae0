"""Functions of ``horovod.torch.functions``: copy one rank's parameters, optimizer state or objects to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import torch

import elasticstate
from elasticstate.extension import Channel
from elasticstate.horovod import calls, negotiation, timeline
from elasticstate.horovod.calls import Call, CallKind, CallUsageError
from elasticstate.horovod.collectives import allgather_object, broadcast_object, refusal_of_root, start_broadcast
from elasticstate.horovod.world import ProcessSet, members_of

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

Parameters: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]]"


def broadcast_parameters(params: Parameters, root_rank: int = 0, process_set: ProcessSet | None = None) -> None:
    """Copy the root's tensors into those of all ranks: a ``state_dict()``, or ``named_parameters()``.

    Args:
        params: the same names, shapes and dtypes on all ranks. Values that are None are skipped.
        root_rank: rank whose tensors are sent, 0 to size() - 1.
        process_set: ranks that take part; None: all.

    Raises UsageError, on all ranks, if names, shapes or dtypes differ, a value is not a tensor, or there is no such
    root.
    """
    members = members_of(process_set)
    lines = [calls.signature("broadcast_parameters", None, root_rank=root_rank)]
    wrong = refusal_of_root(root_rank, members)
    tensors: list[torch.Tensor] = []
    for pair in params.items() if isinstance(params, Mapping) else params:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise CallUsageError(
                "broadcast_parameters: params must be a state_dict, or pairs of name and tensor. Pass "
                "model.state_dict()."
            )
        name, value = pair
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            lines.append(f"{name}: {calls.form(value)}")
        elif value is not None:
            lines.append(f"{name}: {type(value).__name__}")
            wrong = wrong or f"{name} is not a tensor but a {type(value).__name__}: use broadcast_object for it"
    call = Call(CallKind.OTHER, tuple(lines), wrong=wrong)
    negotiation.agree(call, members)
    span = timeline.exchange(call, *tensors)
    for handle in [start_broadcast(tensor, root_rank, members, None) for tensor in tensors]:
        handle.wait()
    timeline.end(span)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Copy the root's optimizer state and parameter groups, with learning rates, to all ranks.

    Missing state on a rank is created from the root's, and state that the root lacks is removed. No step is taken.
    ``model`` exists for old scripts only.

    Raises UsageError, on all ranks, if their parameters differ in dtype or shape, or there is no such root.
    """
    members = members_of(None)
    lines = [calls.signature("broadcast_optimizer_state", None, root_rank=root_rank)]
    lines += [calls.form(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    negotiation.agree(Call(CallKind.OTHER, tuple(lines), wrong=refusal_of_root(root_rank, members)), members)
    state = elasticstate.TorchState(optimizer=optimizer)
    channel = Channel(None, root_rank)
    if members.index == root_rank:
        captured = state.capture()
        tensors = {name: value for name, value in captured.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in captured.items() if name not in tensors}
        channel.send(cloudpickle.dumps(([(name, *_form(tensor)) for name, tensor in tensors.items()], others)))
        for tensor in tensors.values():
            channel.broadcast(_bytes(tensor.detach().cpu().contiguous()))
        return
    forms, values = cloudpickle.loads(channel.receive())
    for name, shape, strides, dtype in forms:
        content = torch.empty(shape, dtype=dtype, device="cpu")
        channel.broadcast(_bytes(content))
        values[name] = torch.empty_strided(shape, strides, dtype=dtype, device="cpu").copy_(content)
    state.apply(values)


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return shape, strides and dtype. Fused optimizers need the strides of the parameter."""
    like = torch.empty_like(tensor, device="meta")  # without the holes of a part of another tensor
    return tuple(tensor.shape), like.stride(), tensor.dtype


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
