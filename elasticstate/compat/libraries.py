"""Private names of Accelerate 1.15.0 and Transformers 5.24.0. tests/unit/huggingface checks that these exist.

Both libraries keep the world in singletons that are created once in a process. There is no public way to clear them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]

from elasticstate.log import logger

# --------------------------------------------------------------------------------------------------------- absent names
# Warnings about private names that the installed version of a library does not have.


CHECKED = {"torch": "2.13", "Python": "3.11", "lightning": "2.6"}
"""The versions in which the names of this package were checked."""


@functools.cache
def warn_absent(library: str, name: str, effect: str) -> None:
    """Log once that the installed library does not have this name. ``effect``: the consequence, as a clause."""
    logger.warning(
        "%s %s has no %s, so %s. Install %s %s, or a newer version of elasticstate.",
        library,
        _installed(library),
        name,
        effect,
        library,
        CHECKED[library],
    )


def _installed(library: str) -> str:
    if library == "Python":
        return python_version()
    try:
        return version(library)
    except PackageNotFoundError:
        return "(unknown version)"


# ------------------------------------------------------------------------------------------------------------ libraries


# --------------------------------------------------------------------------------------------------------- hugging face


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


# ------------------------------------------------------------------------------------------------------ lightning loops
# Private names of PyTorch Lightning. Checked with lightning 2.6. This module does not import it.
#
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


# ---------------------------------------------------------------------------------------------------------- ray cluster
# Draining nodes of Ray, which its public Python API does not show. Checked with Ray 2.60.


def draining_nodes() -> Collection[str]:
    """Return the ids of the nodes that are being drained. The process is connected to the cluster."""
    from ray._private.state import state  # type: ignore[import-not-found,unused-ignore]

    ids: dict[str, int] = state.get_draining_nodes()  # Ray Serve uses it for the same purpose
    return ids.keys()
