"""Private names of tensors. Checked with torch 2.13.

- ``torch._foreach_copy_``: copies many tensors in one call; 100 small ones in less than half the time of single copies
  (on a CPU), and with one kernel instead of 100 on a GPU.
- ``Tensor._version``: the number of writes in place, which autograd checks, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from elasticstate.compat.absent_names import warn_absent

_foreach_copy: Any = getattr(torch, "_foreach_copy_", None)

_VERSION = "_version"
version_of: Callable[[torch.Tensor], int] = attrgetter(_VERSION)
"""Return the number of writes to the tensor's memory, as far as torch counts them."""


def version_descriptor() -> object:
    """Return the descriptor of the attribute that ``version_of`` reads, for native code that reads many."""
    return getattr(torch.Tensor, _VERSION)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    """Copy each source to the target at the same position, of the same shape."""
    if _foreach_copy is not None and targets:
        _foreach_copy(list(targets), list(sources), non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def has_versions() -> bool:
    """Return True if ``version_of`` works; else warn once."""
    if hasattr(torch.Tensor, _VERSION):
        return True
    warn_absent("torch", f"torch.Tensor.{_VERSION}", "training stops while a commit is copied from a device")
    return False
