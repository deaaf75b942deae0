"""Private names of Accelerate 1.15.0 and Transformers 5.24.0. tests/unit/huggingface checks that these exist.

Both libraries keep the world in singletons that are created once in a process. There is no public way to clear them.
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]

TRAINER_METHODS = ("_init_training_state",)
"""Methods of ``transformers.Trainer`` that elasticstate overrides: it returns the epoch in which the loop begins."""

TRAINER_ATTRIBUTES = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Attributes that belong to the position of the loop: sums of losses, and the steps at which the sums begin."""


def clear_singletons() -> None:
    """Make Accelerate read rank and size again. Otherwise it continues with those of an earlier world."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def set_local_place(place: int) -> None:
    """Make the worker with place 0 the main process of its host, whatever its local rank.

    Both libraries decide this by the local rank. Where a host has several GPUs, that is the device index, the slot.
    """
    PartialState.is_local_main_process = property(lambda _: place == 0)
    if arguments := sys.modules.get("transformers.training_args"):
        arguments.TrainingArguments.local_process_index = property(lambda _: place)


def knows_world() -> bool:
    """Return True if Accelerate has read rank and size since ``clear_singletons``."""
    return bool(PartialState._shared_state)


def forget_preparation(model: Any) -> None:
    """Undo what ``Accelerator.prepare`` did to ``model`` itself in an earlier world.

    In a world of one, ``prepare`` marks the model (``Accelerator.prepare``, accelerator.py). A marked model never gets
    its DistributedDataParallel wrapper. For mixed precision, ``prepare`` also wraps ``forward``, again in each world.
    """
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    model.__dict__.pop("_is_accelerate_prepared", None)
