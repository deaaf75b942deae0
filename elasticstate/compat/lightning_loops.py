"""Private names of PyTorch Lightning. Checked with lightning 2.6. This module does not import it.

- ``Trainer._signal_connector.register_signal_handlers``: it handles SIGTERM by a broadcast, in one rank alone. The
  worker's own handler makes SIGTERM a preemption notice. No option turns Lightning's off, except in its Slurm plugin.
- ``Trainer.fit_loop.epoch_loop._batches_that_stepped``: the step that loggers get. Lightning adds one to it when it
  resumes where it would validate (``_TrainingEpochLoop.on_advance_end``).
- ``Trainer.fit_loop._restarting``: while it is True, schedulers that depend on a metric are not stepped at the end of
  an epoch (``_FitLoop.on_advance_end``). The setter of the public property keeps it True with ``max_steps``.
"""

from __future__ import annotations

from typing import Any

from elasticstate.compat.absent_names import warn_absent


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
