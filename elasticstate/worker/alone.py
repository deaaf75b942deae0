"""``run`` under plain ``python train.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from elasticstate.config import foreign_world_size
from elasticstate.errors import UsageError
from elasticstate.state.base import State
from elasticstate.worker import contexts, world
from elasticstate.worker.own_groups import OwnProcessGroups


class Alone:
    """A world of one, without a driver: commits in ordinary memory, nobody to wait for."""

    def __init__(self) -> None:
        """Raises UsageError in a process of another launcher's world."""
        self._has_joined = False
        others = foreign_world_size()
        if others > 1:
            raise UsageError(
                f"WORLD_SIZE is {others}, but this process was not started by elasticrun: start it with "
                f"'elasticrun -np {others} python ...' instead of another launcher"
            )

    def join(self) -> None:
        self._has_joined = True
        excepthook = sys.excepthook
        dist.init_process_group(contexts.for_torch(), store=HashStore(), rank=0, world_size=1)
        sys.excepthook = excepthook
        world.enter(world.alone())

    def run(self, state: State, call: Callable[[], Any], warmup: Callable[[], object] | None, _: object) -> Any:
        if warmup is not None:
            warmup()
        if not self._has_joined:
            self.join()
        try:
            with OwnProcessGroups():
                state.sync()
                return call()
        finally:
            self.leave()

    def leave(self) -> None:
        dist.destroy_process_group()
