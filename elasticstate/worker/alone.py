"""SoloLoop: ``run`` under plain ``python train.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from elasticstate import present_world
from elasticstate.compat.stores import HashStore
from elasticstate.config import refusal_of_other_launchers
from elasticstate.errors import UsageError
from elasticstate.state.base import State
from elasticstate.worker import contexts
from elasticstate.worker.own_groups import OwnProcessGroups


class SoloLoop:
    """A world of one, without a driver. Commits are in ordinary memory, and there are no other workers to wait for."""

    def __init__(self) -> None:
        """Raise UsageError in a process of another launcher's world."""
        self._has_joined = False
        if refusal := refusal_of_other_launchers():
            raise UsageError(refusal)

    def join(self) -> None:
        self._has_joined = True
        excepthook = sys.excepthook
        dist.init_process_group(contexts.for_torch(), store=HashStore(), rank=0, world_size=1)
        sys.excepthook = excepthook
        present_world.enter(present_world.alone())

    def run(self, state: State, call: Callable[[], Any], warmup: Callable[[], object] | None, _: object) -> Any:
        if warmup is not None:
            warmup()
        if not self._has_joined:
            self.join()
        try:
            return self.run_in_last_world(state, call)
        except BaseException:
            self.end()
            raise

    def run_in_last_world(self, state: State, call: Callable[[], Any], _: object = None) -> Any:
        with OwnProcessGroups():
            state.sync()
            return call()

    def finish(self) -> None:
        """Do nothing: there are no members to wait for."""

    def end(self) -> None:
        dist.destroy_process_group()

    def proves_failure(self, error: BaseException) -> bool:
        return False
