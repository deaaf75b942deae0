"""Gloo and NCCL, and the choice of the backend in a worker. See context.py and elasticstate.backends."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from elasticstate.backends import BACKENDS
from elasticstate.plug_ins import load_part
from elasticstate.worker.contexts.context import Backend
from elasticstate.worker.contexts.nccl import torch_name


def choose(name: str) -> Backend:
    """Return the backend with this name. ``auto`` chooses by the devices of this machine."""
    parts = BACKENDS[by_devices() if name == "auto" else name]
    return cast(Backend, load_part(parts.worker)())


def by_devices() -> str:
    """Return the backend that ``auto`` chooses on this machine."""
    return "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"


def for_torch() -> str:
    """Return the backend name for torch's ``init_process_group``, for a process without other members."""
    name = by_devices()
    return f"cpu:gloo,cuda:{torch_name(name)}" if name == "nccl" else name
