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
from elasticstate.errors import UsageError
from elasticstate.net.messages import FromWorkerBody
from elasticstate.worker.contexts.mpi.context import MpiContext
from elasticstate.worker.contexts.mpi.identity import forget_identity
from elasticstate.worker.contexts.mpi.library import MPI
from elasticstate.worker.contexts.mpi.world import WorldBuilder


class Mpi:
    """The backend (see contexts.context.Backend).

    The members of a job's first world start MPI in it, together: Open MPI gives shared memory only to processes of one
    job of its own. A newcomer starts it before it is READY, so that the others do not wait for that.
    """

    def __init__(self) -> None:
        self._builder: WorldBuilder | None = None

    def prepare(self, environment: WorkerEnvironment, say: Callable[[FromWorkerBody], None]) -> None:
        if MPI.Is_initialized():
            raise UsageError(
                "--backend: 'mpi': takes a script that leaves MPI_Init to elasticstate: remove it, or what calls it"
            )
        path = Path(f"{environment.commits}.identity")
        forget_identity(path)
        self._builder = WorldBuilder(environment.worker.host, environment.local_address, os.getpid(), path, say)
        if environment.reserve_bytes:  # others have committed
            self._builder.start_early()

    def context(self) -> MpiContext:
        return MpiContext(self._builder)
