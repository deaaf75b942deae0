"""Functions of Horovod that this package does not have. Their errors name the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from elasticstate.errors import UsageError
from elasticstate.horovod.world import refuse_process_set


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Raise UsageError: use torch.profiler."""
    raise UsageError(
        "elasticstate.horovod has no start_timeline(). Use torch.profiler.profile() and its export_chrome_trace()."
    )


def stop_timeline() -> NoReturn:
    """Raise UsageError, like ``start_timeline``."""
    raise UsageError("elasticstate.horovod has no stop_timeline(). Use torch.profiler.profile().")


class ProcessSet:
    """A class whose constructor raises UsageError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_process_set(self)


def add_process_set(process_set: object) -> NoReturn:
    """Raise UsageError: use ``torch.distributed.new_group``."""
    refuse_process_set(process_set if process_set is not None else ())
    raise AssertionError("unreachable")
