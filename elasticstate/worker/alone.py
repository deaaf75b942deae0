"""SoloLoop: ``run`` under plain ``python train.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from elasticstate import present_world
from elasticstate.compat.stores import HashStore, Store
from elasticstate.state.base import State
from elasticstate.state.step_check import StepCheck
from elasticstate.worker import contexts
from elasticstate.worker.own_groups import OwnProcessGroups


class SoloLoop:
    """A world of one, without a driver. Commits are in ordinary memory, and there are no other workers to wait for."""

    def __init__(self) -> None:
        self._has_joined = False

    def join(self) -> None:
        self._has_joined = True
        create_default_group(HashStore(), 0, 1)
        present_world.enter(present_world.alone())

    def run(self, state: State, call: Callable[[], Any], warmup: Callable[[], object] | None, _: object) -> Any:
        """Return the result of the user's function. The world exists until ``end``."""
        if warmup is not None:
            warmup()
        if not self._has_joined:
            self.join()
        try:
            with StepCheck(state, call):
                result = self.run_in_last_world(state, call)
            self.finish()
        except BaseException:
            self.end()
            raise
        return result

    def run_in_last_world(self, state: State, call: Callable[[], Any], _: object = None) -> Any:
        """Call a function of the user. There is no other world."""
        with OwnProcessGroups():
            state.sync()
            return call()

    def finish(self) -> None:
        """Do nothing: there are no members to wait for."""

    def end(self) -> None:
        """Destroy the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def failure_text(self, error: BaseException) -> str:
        return ""


def create_default_group(store: Store, rank: int, size: int) -> None:
    """Create the default process group of a world without a driver."""
    excepthook = sys.excepthook
    dist.init_process_group(contexts.for_torch(), store=store, rank=rank, world_size=size)
    sys.excepthook = excepthook
