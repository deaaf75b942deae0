"""TorchGroups: the groups that torch creates in one generation.

These are the default group and those of user code's ``new_group``, ``split_group`` and ``DeviceMesh``. TorchGroups
registers each group, and sets the world's timeout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elasticstate.compat import process_groups
from elasticstate.errors import CollectiveError
from elasticstate.log import logger


class TorchGroups:
    """Registry of all groups of this process from ``create`` to ``destroy``. Main thread only."""

    def __init__(self, begin: Callable[[int], bool], end: Callable[[], None]) -> None:
        """Set the callbacks: ``begin(size)`` before the creation of a group (False stops it), ``end()`` afterwards."""
        self._begin = begin
        self._end = end
        self._timeout = timedelta()
        self._restore_creation: Callable[[], None] | None = None

    def create(self, backend: str, collective_timeout: timedelta, **options: Any) -> None:
        """Call ``init_process_group(backend, **options)``. Later groups get the timeout ``collective_timeout``."""
        self._timeout = collective_timeout
        excepthook = sys.excepthook
        self._restore_creation = process_groups.replace_group_creation(self._create_registered)
        try:
            dist.init_process_group(backend, **options)
        finally:
            sys.excepthook = excepthook  # each init_process_group wraps it again

    def destroy(self) -> None:
        """Destroy the groups, if any were created."""
        if self._restore_creation is not None:
            self._restore_creation()
            self._restore_creation = None
        if dist.is_initialized():
            process_groups.destroy_groups(logger.error)
        process_groups.reset_group_count()

    def retire(self) -> list[Any]:
        """Take all groups out of use. Whoever drops the returned list destroys the groups, on any thread."""
        groups = process_groups.all_groups()
        self.destroy()
        return groups

    def _create_registered(
        self, create: Callable[..., Any], size: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if kwargs.get("timeout") in process_groups.DEFAULT_TIMEOUTS:
            kwargs["timeout"] = self._timeout
        if not self._begin(size):
            raise CollectiveError("the generation has ended")
        try:
            return create(*args, **kwargs)
        finally:
            self._end()
