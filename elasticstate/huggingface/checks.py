"""Checks that the libraries are in the same world as elasticstate, and in a mode that can be elastic."""

from __future__ import annotations

from typing import Any

from elasticstate.errors import UsageError
from elasticstate.extension import world_size

_MODES = ("NO", "MULTI_CPU", "MULTI_GPU")


def check_world(what: str, size: int) -> None:
    """Raise UsageError if Accelerate's world has another size: each rank would train alone, without an error."""
    if size != world_size():
        raise UsageError(
            f"{what} is in a world of {size}, and elasticstate in a world of {world_size()}. Create it inside the "
            "function decorated with run. On a machine without GPUs, use TrainingArguments(use_cpu=True) or "
            "Accelerator(cpu=True)."
        )


def refuse(what: str, remedy: str) -> None:
    """Raise UsageError for a feature that elasticstate does not support."""
    raise UsageError(f"{what} is not supported by elasticstate.huggingface. {remedy}")


def check_accelerator(accelerator: Any) -> None:
    """Raise UsageError for modes of an Accelerator in which the ranks hold different states, or share batches."""
    check_world("The Accelerator", accelerator.num_processes)
    mode = accelerator.distributed_type.value
    if mode not in _MODES:
        refuse(f"Distributed type {mode}", "Only DistributedDataParallel on CPUs or NVIDIA GPUs can be elastic.")
    if accelerator.parallelism_config is not None:
        refuse("parallelism_config", "Remove it: each rank must hold the whole model.")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name):
            refuse(f"{name}=True", "Remove it: elasticstate divides the batches itself.")
