"""MPI with ULFM, by mpi4py.

``context.py``: the groups of a generation · ``world.py``: its communicator, out of that of the last one ·
``identity.py``: how a process comes to be one of MPI's · ``group.py``: torch's collectives as MPI's ·
``operation.py``: those under way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from elasticstate.config import WorkerEnvironment
from elasticstate.net.messages import FromWorkerBody
from elasticstate.worker.contexts.mpi.context import MpiContext
from elasticstate.worker.contexts.mpi.identity import forget_identity
from elasticstate.worker.contexts.mpi.world import WorldBuilder


class Mpi:
    """The backend (see contexts.context.Backend). MPI itself starts with the first world."""

    def __init__(self) -> None:
        self._builder: WorldBuilder | None = None

    def prepare(self, environment: WorkerEnvironment, say: Callable[[FromWorkerBody], None]) -> None:
        path = Path(f"{environment.commits}.identity")
        forget_identity(path)
        self._builder = WorldBuilder(environment.worker.host, os.getpid(), path, say)

    def context(self) -> MpiContext:
        return MpiContext(self._builder)
