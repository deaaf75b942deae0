"""Vocabulary of this package: the description of a call, the ranks that make it together, and the errors.

The description of a call is a text that must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elasticstate import extension
from elasticstate.errors import CollectiveError, NotInWorldError, UsageError

if TYPE_CHECKING:
    from elasticstate.horovod.negotiation import LateHandle, NameUse


class CallKind(IntEnum):
    """Action of a rank in ``join()`` when the others make a call."""

    STEP = 1  # reduce the gradients of the optimizer with the call's digest
    TICK = 2  # end a tick
    ALLREDUCE = 3  # allreduce; numbers: index of the operation, elements, index of the dtype
    BARRIER = 4  # nothing
    OTHER = 5  # nothing: the others raise an error, as the call needs all ranks


@dataclass(frozen=True)
class Call:
    """One call of this rank."""

    kind: CallKind
    lines: tuple[str, ...]  # the call with its arguments, then its parts, if it has many; the same on all ranks
    numbers: tuple[int, ...] = ()  # data for a rank in ``join()``; a function of ``lines``. At most three
    wrong: str = ""  # the error in the arguments on this rank; "": none. All ranks raise it
    name: str | None = None  # of the tensor or object; None: none was given
    is_unique: bool = False  # no other call of this function and name may be in progress at the same time
    is_wait: bool = False  # it only waits for an earlier call of this rank that other ranks have not made yet

    @property
    def key(self) -> str | None:
        """Function and name, if they identify the call among those in progress."""
        return f"{self.function} {self.name}" if self.is_unique and self.name is not None else None

    @property
    def function(self) -> str:
        """The name of the function, without its arguments."""
        return self.lines[0].partition("(")[0]

    @cached_property
    def digest(self) -> int:
        """63-bit hash of the lines."""
        text = "\n".join(self.lines).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def signature(function: str, name: str | None, **arguments: object) -> str:
    """Return ``function(name='x', key=value)`` without the arguments that are None."""
    given = {"name": repr(name) if name is not None else None, **arguments}
    return f"{function}({', '.join(f'{key}={value}' for key, value in given.items() if value is not None)})"


def named(tensors: Sequence[torch.Tensor], name: str | None) -> list[tuple[torch.Tensor, str | None]]:
    """Return the tensors of a group, each with the name of its call."""
    names = (None if name is None else f"{name}.{i}of{len(tensors)}" for i in range(1, len(tensors) + 1))
    return list(zip(tensors, names, strict=True))


def form(tensor: torch.Tensor, any_length: bool = False) -> str:
    """Return dtype and shape as text, with device and layout if unusual.

    ``any_length``: the first dimension may differ between ranks.
    """
    shape: list[object] = list(tensor.shape)
    if any_length and shape:
        shape[0] = "*"
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    layout = "" if tensor.layout is torch.strided else f", {name(tensor.layout)}"
    return f"{name(tensor.dtype)}[{', '.join(map(str, shape))}]{device}{layout}"


def name(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def refusal(tensor: torch.Tensor, *, needs_dimension: bool = False) -> str:
    """Return the reason why ``tensor`` cannot be sent; "" if it can."""
    if tensor.layout is not torch.strided:
        return f"the tensor is {name(tensor.layout)}: call to_dense() on it"
    if needs_dimension and tensor.dim() == 0:
        return "the tensor has no dimensions: call view(1) on it"
    return ""


@dataclass(frozen=True, eq=False)
class Members:
    """The ranks that make a call together, in one world."""

    generation: int  # of the world
    ranks: tuple[int, ...]  # in the world, ascending
    index: int  # of this worker among them; -1: it is not one of them
    # Process groups, which torch owns, and ends with the world: for the calls of the script (None: torch's default
    # group), and for gradients (None if there is only one member).
    calls: weakref.ref[dist.ProcessGroup] | None = None
    gradients: weakref.ref[dist.ProcessGroup] | None = None
    process_set: int = 0  # number of the process set; 0: all ranks of the world
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # for the calls of the script
    earlier: dict[str, LateHandle[Any]] = field(
        default_factory=dict
    )  # by key: calls that other ranks have not made yet
    running: dict[str, NameUse] = field(default_factory=dict)  # started calls, by key

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group for the calls of the script, as torch's functions take it."""
        return None if self.calls is None else self.calls()

    @property
    def lane(self) -> dist.ProcessGroup | None:
        """The process group for gradients: in ``group``, a call of the script could be matched with a bucket."""
        return None if self.gradients is None else self.gradients()


# ------------------------------------------------------------------------------------------------------------- failures
# Errors of this package. Each is one of elasticstate's, and also what Horovod raises in its place.
#
# ::
#
#     UsageError
#      └── ArgumentUsageError (ValueError)                  an argument is wrong
#           ├── CallUsageError (HorovodInternalError)       the ranks' calls differ, or a call's argument is wrong
#           └── OptimizerUsageError (AssertionError)        a DistributedOptimizer is used in the wrong way
#     NotInWorldError
#      └── NotInitializedError (ValueError)                 no world: init() was not called, or it has ended
#     CollectiveError                                       HorovodInternalError: a member of the world has failed
#
# ``elastic.run`` restores after a CollectiveError, except one that is a UsageError: a retry would not help.


class ArgumentUsageError(UsageError, ValueError):
    """An argument is wrong. The message says which, and what to do."""


class CallUsageError(ArgumentUsageError, CollectiveError):
    """The calls of the ranks differ, or an argument of a call is wrong. All ranks that made the call raise it.

    They have sent no data, and their next calls match again, so a script may catch it and go on.
    """


class OptimizerUsageError(ArgumentUsageError, AssertionError):
    """A DistributedOptimizer is used in the wrong way. The message says what to do."""


class NotInitializedError(NotInWorldError, ValueError):
    """There is no world: ``init()`` was not called, or the world has ended."""


@contextmanager
def failures_named() -> Iterator[None]:
    """Raise CollectiveError in place of a RuntimeError from torch, if it is proven that a member has failed.

    All other errors pass, such as a dtype that the backend cannot send.
    """
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        if text := extension.failure_text(error):
            raise CollectiveError(text) from error
        raise
