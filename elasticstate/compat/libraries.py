"""Private names of Accelerate 1.15.0, Transformers 5.24.0, Lightning 2.6 and Ray 2.60.

Each library is imported inside of functions at most: a job uses one of them, and may not have the others. Tests in
tests/unit/huggingface and tests/unit/compat check that the names exist.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from elasticstate.compat import warn_absent

# ------------------------------------------------------------------------------------------ Accelerate and Transformers
# Both libraries keep the world in singletons that are created once in a process. There is no public way to clear them.


TRAINER_METHODS = ("_init_training_state",)
"""Methods of ``transformers.Trainer`` that elasticstate overrides: it returns the epoch in which the loop begins."""

TRAINER_ATTRIBUTES = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Attributes that belong to the position of the loop: sums of losses, and the steps at which the sums begin."""


def clear_singletons() -> None:
    """Make Accelerate read rank and size again. Otherwise it continues with those of an earlier world."""
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def set_local_place(place: int) -> None:
    """Make the worker with place 0 the main process of its host, whatever its local rank.

    Both libraries decide this by the local rank. Where a host has several GPUs, that is the device index, the slot.
    """
    from accelerate.state import PartialState

    PartialState.is_local_main_process = property(lambda _: place == 0)
    if arguments := sys.modules.get("transformers.training_args"):
        arguments.TrainingArguments.local_process_index = property(lambda _: place)


def knows_world() -> bool:
    """Return True if Accelerate has read rank and size since ``clear_singletons``."""
    from accelerate.state import PartialState

    return bool(PartialState._shared_state)


def forget_preparation(model: Any) -> None:
    """Undo what ``Accelerator.prepare`` did to ``model`` itself in an earlier world.

    In a world of one, ``prepare`` marks the model (``Accelerator.prepare``, accelerator.py). A marked model never gets
    its DistributedDataParallel wrapper. For mixed precision, ``prepare`` also wraps ``forward``, again in each world.
    """
    from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]

    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    model.__dict__.pop("_is_accelerate_prepared", None)


# ------------------------------------------------------------------------------------------------------------ Lightning
# - ``Trainer._signal_connector.register_signal_handlers``: it handles SIGTERM by a broadcast, in one rank alone. The
#   worker's own handler makes SIGTERM a preemption notice. No option turns Lightning's off, except in its Slurm plugin.
# - ``Trainer.fit_loop.epoch_loop._batches_that_stepped``: the step that loggers get. Lightning adds one to it when it
#   resumes where it would validate (``_TrainingEpochLoop.on_advance_end``).
# - ``Trainer.fit_loop._restarting``: while it is True, schedulers that depend on a metric are not stepped at the end of
#   an epoch (``_FitLoop.on_advance_end``). The setter of the public property keeps it True with ``max_steps``.


def keep_signal_handlers(trainer: Any) -> None:
    """Do not let a Trainer replace the handlers of signals."""
    connector: Any = getattr(trainer, "_signal_connector", None)
    if hasattr(connector, "register_signal_handlers"):
        connector.register_signal_handlers = _do_nothing
    else:
        warn_absent(
            "lightning",
            "Trainer._signal_connector.register_signal_handlers",
            "a worker that gets SIGTERM during training fails instead of leaving",
        )


def logger_step(trainer: Any) -> int | None:
    """Return the step that loggers get next; None if it is not known."""
    step: int | None = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
    if step is None:
        warn_absent(
            "lightning",
            "Trainer.fit_loop.epoch_loop._batches_that_stepped",
            "the steps in logs may be too high by one after each change of the world",
        )
    return step


def end_restart(trainer: Any, step: int | None) -> None:
    """End the restart of a Trainer that resumed, before its first batch. Loggers get ``step`` next."""
    if step is not None:
        trainer.fit_loop.epoch_loop._batches_that_stepped = step
    if hasattr(trainer.fit_loop, "_restarting"):
        trainer.fit_loop._restarting = False
    else:
        warn_absent(
            "lightning",
            "Trainer.fit_loop._restarting",
            "ReduceLROnPlateau is not stepped in an epoch in which the world changes",
        )


def _do_nothing() -> None:
    pass


# ------------------------------------------------------------------------------------------------------------------ Ray


def draining_nodes() -> Collection[str]:
    """Return the ids of the nodes that are being drained, which Ray's public Python API does not show.

    The process is connected to the cluster.
    """
    from ray._private.state import state  # type: ignore[import-not-found,unused-ignore]

    ids: dict[str, int] = state.get_draining_nodes()  # Ray Serve uses it for the same purpose
    return ids.keys()
