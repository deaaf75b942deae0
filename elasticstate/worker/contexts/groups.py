"""The groups that torch makes in one generation: the default one, and those of user code's ``new_group`` and of
``DeviceMesh``. All of them come by one place in torch, where they are noted and get the world's time-out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticstate.errors import CollectiveError


class TorchGroups:
    """From ``create`` to ``destroy`` every group of this process is noted. On the main thread only."""

    def __init__(self, begin: Callable[[int], bool], end: Callable[[], None]) -> None:
        """``begin`` is called with its size before a group is made (False: the generation has ended), ``end`` after."""
        self._begin = begin
        self._end = end
        self._timeout = timedelta()
        self._torch_helper: Any = None

    def create(self, backend: str, collective_timeout: timedelta, **options: Any) -> None:
        """``init_process_group(backend, **options)``, whose time-out becomes ``collective_timeout`` afterwards."""
        self._timeout = collective_timeout
        excepthook = sys.excepthook
        self._torch_helper = distributed_c10d._new_process_group_helper
        distributed_c10d._new_process_group_helper = self._noted_helper
        try:
            dist.init_process_group(backend, **options)
        finally:
            sys.excepthook = excepthook  # each init_process_group wraps it once more

    def destroy(self) -> None:
        """Take down what was made, if anything was."""
        if self._torch_helper is not None:
            distributed_c10d._new_process_group_helper = self._torch_helper
            self._torch_helper = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group that failed to be made has been counted all the same, and the count is part of the next one's name.
        distributed_c10d._world.group_count = 0

    def _noted_helper(self, group_size: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("timeout") == distributed_c10d.default_pg_timeout:
            kwargs["timeout"] = self._timeout
        if not self._begin(group_size):
            raise CollectiveError("the generation has ended")
        try:
            return self._torch_helper(group_size, *args, **kwargs)
        finally:
            self._end()
