"""``start_timeline`` and ``stop_timeline``."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from elasticstate import extension
from elasticstate.horovod import timeline, world
from elasticstate.horovod.calls import ArgumentUsageError
from elasticstate.horovod.timeline import Recorder

_exit_in: int | None = None  # the process that closes its timeline when it ends: a forked child must not


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the collectives in a file for chrome://tracing, until ``stop_timeline``. All ranks call this.

    Rank 0 writes. If another worker becomes rank 0 in a later world, it continues the file. So the directory must exist
    on each host, best on a shared disk. A file of another job is replaced.

    Args:
        file_path: path of the file.
        mark_cycles: mark the ends of ticks. Horovod's cycles do not exist here.

    Raises:
        NotInWorldError: before ``init()``.
        UsageError: the directory does not exist or cannot be written, or a timeline is started already. In a later
            world than that of its start, the same file continues.
    """
    global _exit_in
    world.need_init()
    path = Path(file_path).absolute()
    present, generation = timeline.present(), extension.world_generation()
    if present is not None and present.path == str(path) and present.started_in != generation:
        present.started_in = generation
        return
    if present is not None:
        raise ArgumentUsageError(
            f"start_timeline({str(file_path)!r}): a timeline is started already: {present.path}. Call "
            "hvd.stop_timeline() first."
        )
    if not path.parent.is_dir():
        raise ArgumentUsageError(
            f"start_timeline({str(file_path)!r}): there is no directory {path.parent}. Make it first."
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentUsageError(f"start_timeline({str(file_path)!r}): cannot be written. Choose another file.")
    timeline.use(Recorder(str(path), mark_cycles))
    if _exit_in is None:
        atexit.register(_close_at_exit)
    _exit_in = os.getpid()


def stop_timeline() -> None:
    """End the timeline, and write all of it. All ranks call this. Raises UsageError if none is started."""
    recorder = timeline.present()
    if recorder is None:
        raise ArgumentUsageError("stop_timeline(): no timeline is started. Call hvd.start_timeline(file) first.")
    timeline.use(None)
    recorder.close()


def start_by_environment() -> None:
    """Start the timeline that HOROVOD_TIMELINE names, unless one is started. DYNAMIC: the script starts it."""
    path = extension.environment_variable("HOROVOD_TIMELINE")
    if path and path != "DYNAMIC" and timeline.present() is None:
        start_timeline(path, extension.environment_variable("HOROVOD_TIMELINE_MARK_CYCLES") not in ("", "0"))


def _close_at_exit() -> None:
    recorder = timeline.present()
    if recorder is not None and os.getpid() == _exit_in:
        recorder.close()
