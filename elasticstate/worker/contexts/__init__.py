"""Backends: ways to send tensors between the members of a world. See context.py. Only this module names a backend."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch
import torch.distributed as dist

from elasticstate.worker.contexts.context import Backend

_CLASSES = {"gloo": "gloo:GlooBackend", "mpi": "mpi:MpiBackend", "nccl": "nccl:NcclBackend"}


def choose(name: str) -> Backend:
    """Return the backend with this name. ``auto`` chooses by the devices of this machine."""
    module, _, kind = _CLASSES[by_devices() if name == "auto" else name].partition(":")
    return cast(Backend, getattr(import_module(f"{__name__}.{module}"), kind)())


def by_devices() -> str:
    """Return the backend that ``auto`` chooses on this machine."""
    return "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"


def for_torch() -> str:
    """Return the backend name for torch's ``init_process_group``, for a process without other members."""
    return {"nccl": "cpu:gloo,cuda:nccl"}.get(name := by_devices(), name)
