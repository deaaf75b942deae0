"""What lets a rank that is in ``join()`` take part: before each collective of the script a small one says what comes.

A header is the sum over all ranks of what those say that still train; those in ``join()`` say nothing. They are sent in
the order of the script, the same on all ranks, by the default process group; who trains does not wait for its answer.
Ticks that the state ends have a header only while somebody is known to have joined; any header has their number.
"""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elasticstate.errors import UsageError
from elasticstate.horovod.reduction import Op
from elasticstate.state.base import State
from elasticstate.state.order import world_generation

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
OPS = tuple(Op)
_LENGTH = 6  # how many train, ticks, kind, up to three numbers


class Kind(IntEnum):
    """What comes."""

    STEP = 1  # number of the reducer
    TICK = 2
    ALLREDUCE = 3  # index of the operation, elements, index of the dtype
    BARRIER = 4
    OTHER = 5  # what nobody can take part in with nothing


class Header(NamedTuple):
    """What those that train are about to do."""

    ticks: int
    kind: Kind
    numbers: tuple[int, ...]


_state: weakref.ref[State] | None = None  # the one that elastic.run works with
_last: tuple[int, Any, torch.Tensor] | None = None  # the last header that was sent: its generation, torch's handle


def use(state: State | None) -> None:
    """Whose ticks are counted; None: ``elastic.run`` has left the world, and nothing of it is kept."""
    global _state, _last
    _state = weakref.ref(state) if state is not None else None
    _last = None


def state() -> State | None:
    return _state() if _state is not None else None


def ticks() -> int:
    """Completed in this world."""
    present = state()
    return present._session.ticks if present is not None else 0


def send(kind: Kind, *numbers: int) -> None:
    """Say what comes, on all ranks that train. Raises UsageError for OTHER if not all do."""
    global _last
    if dist.get_world_size() == 1:
        return
    header = torch.zeros(_LENGTH, dtype=torch.int64)
    header[: 3 + len(numbers)] = torch.tensor([1, ticks(), kind, *numbers])
    _last = world_generation(), dist.all_reduce(header, async_op=True), header
    if kind is Kind.OTHER and some_have_joined():
        raise UsageError("while other ranks are in join(), only allreduce, barrier and optimizers' steps can be done")


def some_have_joined() -> bool:
    """As of the last header. Raises what the collective has raised."""
    if _last is None or _last[0] != world_generation():
        return False
    _, work, header = _last
    work.wait()
    return int(header[0]) < dist.get_world_size()


def tick_comes() -> None:
    """Before the state ends a tick."""
    if some_have_joined():
        send(Kind.TICK)


def receive() -> Header | None:
    """In ``join()``: what those that still train are about to do; None if nobody does any more."""
    global _last
    _last = None
    header = torch.zeros(_LENGTH, dtype=torch.int64)
    dist.all_reduce(header)
    active = int(header[0])
    if not active:
        return None
    present_ticks, kind, *numbers = (header[1:] // active).tolist()
    return Header(present_ticks, Kind(kind), tuple(numbers))
