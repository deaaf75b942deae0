"""What Horovod has and this package has not: each says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from elasticstate.errors import UsageError
from elasticstate.horovod.world import refuse_process_set


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Raises UsageError: torch.profiler has it all."""
    raise UsageError("start_timeline() is not there: use torch.profiler.profile(), and export_chrome_trace() of it")


def stop_timeline() -> NoReturn:
    """Raises UsageError, as ``start_timeline`` does."""
    raise UsageError("stop_timeline() is not there: use torch.profiler.profile()")


class ProcessSet:
    """Raises UsageError when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_process_set(self)


def add_process_set(process_set: object) -> NoReturn:
    """Raises UsageError: ``torch.distributed.new_group`` does it."""
    refuse_process_set(process_set if process_set is not None else ())
    raise AssertionError("refused")
