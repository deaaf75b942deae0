"""How tensors travel between the members of a world: see context.py. Nobody but this module names a backend."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch
import torch.distributed as dist

from elasticstate.worker.contexts.context import Backend

_CLASSES = {"gloo": "gloo:Gloo", "mpi": "mpi:Mpi", "nccl": "nccl:Nccl"}


def choose(name: str) -> Backend:
    """The backend of this name. ``auto``: by the devices of this machine."""
    module, _, kind = _CLASSES[by_devices() if name == "auto" else name].partition(":")
    return cast(Backend, getattr(import_module(f"{__name__}.{module}"), kind)())


def by_devices() -> str:
    """What ``auto`` is on this machine."""
    return "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"


def for_torch() -> str:
    """What torch makes the groups of a world of, for a process that has nobody to recover with."""
    return {"nccl": "cpu:gloo,cuda:nccl"}.get(name := by_devices(), name)
