"""Private names of Python 3.10 to 3.13, Accelerate 1.15.0, Transformers 5.24.0, Lightning 2.6 and Ray 2.60.

Other libraries than Python's are imported inside of functions at most: a job uses one of them, and may not have the
others. Tests in tests/unit/huggingface and tests/unit/compat check that the names exist.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import runpy
import sys
import threading
import traceback
from asyncio import sslproto
from collections.abc import Callable, Collection
from typing import Any

from elasticstate.compat import warn_absent

# --------------------------------------------------------------------------------------------------------------- Python
# - ``_thread.start_new_thread`` is documented, in spite of its name.
# - ``runpy._run_module_as_main`` is what ``python -m`` calls. ``run_module``, which is public, removes ``__main__``
#   again when the module has ended.
# - ``asyncio.sslproto.SSLProtocol.max_size``: asyncio fills a buffer of this size for each TLS connection (from Python
#   3.11 on). Without this name, connections only take more memory.
# - ``_signal.getsignal``: ``signal.getsignal`` takes 70 times as long, because it looks for an enum with the value.
# - ``sys._current_frames`` and ``_current_exceptions`` are documented, in spite of their names.


_MAX_SIZE = "max_size"
handler_of: Callable[[int], object] = _signal.getsignal


def stack_of(thread: threading.Thread) -> traceback.StackSummary:
    """Return the present Python stack of a thread, the innermost frame last; empty if the thread has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)


def handles_exception(thread: threading.Thread) -> bool:
    """Return True if a thread is in an except or finally clause, or in a function called there, because of an error."""
    found: object = sys._current_exceptions().get(thread.ident or 0)
    return found not in (None, (None, None, None))  # Python 3.11 has tuples


def start_thread(function: Callable[..., object], *arguments: object) -> None:
    """Start a daemon thread. Unlike ``threading.Thread.start``, it does not wait until the thread runs on a core."""
    _thread.start_new_thread(function, arguments)


def set_tls_buffer_bytes(size: int) -> None:
    """Set the size of the buffer of each new TLS connection. No effect if asyncio has none."""
    if hasattr(sslproto.SSLProtocol, _MAX_SIZE):
        setattr(sslproto.SSLProtocol, _MAX_SIZE, size)


def main_module_runner() -> Callable[[str], object]:
    """Return the function that runs a module as ``__main__``, as ``python -m`` does."""
    run: Callable[[str], object] | None = getattr(runpy, "_run_module_as_main", None)
    if run is None:
        warn_absent("Python", "runpy._run_module_as_main", "exit functions of python -m commands lack __main__")
        return lambda name: runpy.run_module(name, run_name="__main__", alter_sys=True)
    return run


# ------------------------------------------------------------------------------------------ Accelerate and Transformers
# Both libraries keep the world in singletons that are created once in a process. There is no public way to clear them.


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
        connector.register_signal_handlers = lambda: None
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


# ------------------------------------------------------------------------------------------------------------------ Ray


def draining_nodes() -> Collection[str]:
    """Return the ids of the nodes that are being drained, which Ray's public Python API does not show."""
    from ray._private.state import state  # type: ignore[import-not-found,unused-ignore]

    ids: dict[str, int] = state.get_draining_nodes()  # Ray Serve uses it for the same purpose
    return ids.keys()
