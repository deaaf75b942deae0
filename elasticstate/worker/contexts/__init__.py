"""How tensors travel between the members of a world: see context.py. Nobody but :func:`choose` names a backend."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from elasticstate.worker.contexts.context import Backend

_CLASSES = {"gloo": "gloo:Gloo", "mpi": "mpi:Mpi"}


def choose(name: str) -> Backend:
    """The backend of this name. ``auto``: by the devices of this machine."""
    module, _, kind = _CLASSES["gloo" if name == "auto" else name].partition(":")
    return cast(Backend, getattr(import_module(f"{__name__}.{module}"), kind)())
