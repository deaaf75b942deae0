"""Functions of Horovod that this package does not have. Their errors name the alternative."""

from __future__ import annotations

from typing import NoReturn

from elasticstate.errors import UsageError


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Raise UsageError: use torch.profiler."""
    raise UsageError(
        "elasticstate.horovod has no start_timeline(). Use torch.profiler.profile() and its export_chrome_trace()."
    )


def stop_timeline() -> NoReturn:
    """Raise UsageError, like ``start_timeline``."""
    raise UsageError("elasticstate.horovod has no stop_timeline(). Use torch.profiler.profile().")
