"""Part of the MPI backend in a worker.

* ``mpi_context.py``: the groups of a generation
* ``world_builder.py``: the identity of a process for MPI; the communicator of a world, built from that of the last one
* ``group.py``: torch's collectives as MPI calls, and running operations
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from elasticstate.errors import UsageError
from elasticstate.mpi.driver_part import Applicant, IdentityRequest, as_request
from elasticstate.mpi.worker.library import MPI
from elasticstate.mpi.worker.mpi_context import MpiContext
from elasticstate.mpi.worker.world_builder import WorldBuilder, forget_identity
from elasticstate.net.messages import FromWorkerBody
from elasticstate.options import WorkerEnvironment


class MpiBackend:
    """The MPI backend (see worker.contexts.context.Backend).

    The members of a job's first world start MPI in that world, together, because Open MPI uses shared memory only
    between processes of one Open MPI job. A new worker starts MPI before it sends READY, so that the others do not wait
    for the start.
    """

    def __init__(self) -> None:
        self._builder: WorldBuilder | None = None

    def prepare(self, environment: WorkerEnvironment, send: Callable[[FromWorkerBody], None]) -> None:
        if MPI.Is_initialized():
            raise UsageError(
                "--backend: 'mpi': the script has initialized MPI, which elasticstate must do. Remove the call of "
                "MPI_Init, or the library that calls it."
            )

        def request(applicants: tuple[Applicant, ...]) -> None:
            send(as_request(IdentityRequest(applicants)))

        path = Path(f"{environment.commits}.identity")
        forget_identity(path)
        self._builder = WorldBuilder(environment.worker.host, environment.local_address, os.getpid(), path, request)
        if environment.reserve_bytes:  # other workers have committed
            self._builder.start_early()

    def context(self) -> MpiContext:
        return MpiContext(self._builder)
