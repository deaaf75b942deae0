"""Begin alike: parameters and the optimizer's state of one rank on all."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import torch

from elasticstate.errors import UsageError
from elasticstate.horovod import headers, world
from elasticstate.horovod.exchange import start_broadcast
from elasticstate.horovod.headers import Kind
from elasticstate.state.channel import Channel
from elasticstate.state.torch import TorchState

Parameters: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]]"


def broadcast_parameters(params: Parameters, root_rank: int = 0, process_set: object = None) -> None:
    """Copy the root's tensors into those of all ranks: a ``state_dict()``, or ``named_parameters()``.

    Raises UsageError, on all ranks, if they do not have the same names, shapes and dtypes; also for what is no tensor.
    """
    world.refuse_process_set(process_set)
    world.ready()
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    tensors: list[torch.Tensor] = []
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UsageError("broadcast_parameters takes a state_dict or pairs of name and tensor")
        if pair[1] is not None:
            tensors.append(_tensor(*pair))
    headers.send(Kind.OTHER)
    _check_alike([(name, *_form(tensor)) for name, tensor in pairs if tensor is not None])
    for handle in [start_broadcast(tensor, root_rank) for tensor in tensors]:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Make state and parameter groups of the optimizer those of the root, learning rates and all.

    What a rank has not got yet is made from the root's, and what the root has not got is taken away; no step is taken.
    ``model`` is there for old scripts.
    """
    world.ready()
    headers.send(Kind.OTHER)
    state = TorchState(optimizer=optimizer)
    channel = Channel(None, root_rank)
    if world.rank() == root_rank:
        captured = state.capture()
        tensors = {name: value for name, value in captured.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in captured.items() if name not in tensors}
        channel.send(cloudpickle.dumps(([(name, *_form(tensor)) for name, tensor in tensors.items()], others)))
        for tensor in tensors.values():
            channel.broadcast(_bytes(tensor.detach().cpu().contiguous()))
        return
    forms, values = cloudpickle.loads(channel.receive())
    for name, shape, dtype in forms:
        values[name] = torch.empty(shape, dtype=dtype)
        channel.broadcast(_bytes(values[name]))
    state.apply(values)


def _tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"broadcast_parameters: {name} is no tensor but {type(value).__name__}: use broadcast_object")
    return value


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_alike(forms: list[Any]) -> None:
    mine = zlib.crc32(repr(forms).encode())
    theirs = list(itertools.chain.from_iterable(Channel(None, 0).numbers_of_all([mine])))
    different = [rank for rank, other in enumerate(theirs) if other != theirs[0]]
    if different:
        raise UsageError(
            f"broadcast_parameters: names, shapes or dtypes on rank {different[0]} are not those of rank 0: are the "
            f"models made alike?"
        )
