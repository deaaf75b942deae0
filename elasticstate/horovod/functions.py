"""Functions of ``horovod.torch.functions``, for scripts that import that module."""

from __future__ import annotations

from elasticstate.horovod.collectives import allgather_object, broadcast_object
from elasticstate.horovod.start import broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
