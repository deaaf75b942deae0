"""TorchGroups: the groups that torch creates in one generation.

These are the default group and those of user code's ``new_group``, ``split_group`` and ``DeviceMesh``. torch creates
all of them in one of two functions. TorchGroups wraps both, to register each group and to set the world's timeout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticstate.errors import CollectiveError

_DEFAULT_TIMEOUTS = (
    None,
    distributed_c10d.default_pg_timeout,
    getattr(distributed_c10d, "default_pg_nccl_timeout", None),  # of a build with NCCL
)


class TorchGroups:
    """Registry of all groups of this process from ``create`` to ``destroy``. Main thread only."""

    def __init__(self, begin: Callable[[int], bool], end: Callable[[], None]) -> None:
        """Set the callbacks: ``begin(size)`` before the creation of a group (False stops it), ``end()`` afterwards."""
        self._begin = begin
        self._end = end
        self._timeout = timedelta()
        self._torch_helper: Any = None
        self._torch_split: Any = None

    def create(self, backend: str, collective_timeout: timedelta, **options: Any) -> None:
        """Call ``init_process_group(backend, **options)``. Later groups get the timeout ``collective_timeout``."""
        self._timeout = collective_timeout
        excepthook = sys.excepthook
        self._torch_helper = distributed_c10d._new_process_group_helper
        self._torch_split = dist.ProcessGroup.split_group
        distributed_c10d._new_process_group_helper = self._noted_helper
        self._split_by(self._noted_split())
        try:
            dist.init_process_group(backend, **options)
        finally:
            sys.excepthook = excepthook  # each init_process_group wraps it again

    def destroy(self) -> None:
        """Destroy the groups, if any were created."""
        if self._torch_helper is not None:
            distributed_c10d._new_process_group_helper = self._torch_helper
            self._split_by(self._torch_split)
            self._torch_helper = self._torch_split = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group whose creation failed is counted too, and the count is part of the next group's name.
        distributed_c10d._world.group_count = 0

    def _noted_helper(self, *args: Any, **kwargs: Any) -> Any:
        """Replace torch's ``_new_process_group_helper``, whose first argument is the size of the group."""
        return self._noted(self._torch_helper, args[0], *args, **kwargs)

    def _noted_split(self) -> Callable[..., Any]:
        """Return a replacement for torch's ``ProcessGroup.split_group``. It must be a function to work as a method."""
        return lambda parent, ranks, **kwargs: self._noted(self._torch_split, len(ranks), parent, ranks, **kwargs)

    def _noted(self, make: Callable[..., Any], size: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("timeout") in _DEFAULT_TIMEOUTS:
            kwargs["timeout"] = self._timeout
        if not self._begin(size):
            raise CollectiveError("the generation has ended")
        try:
            return make(*args, **kwargs)
        finally:
            self._end()

    @staticmethod
    def _split_by(split: Any) -> None:
        setattr(dist.ProcessGroup, "split_group", split)  # noqa: B010 (for mypy it is a method)
