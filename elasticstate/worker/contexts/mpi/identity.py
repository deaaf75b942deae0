"""Who this process is for MPI: an identity of a job of the PMIx server that ``mpirun`` is (see elasticstate/mpi).

A process that an agent has started becomes a member of that job by the environment of a holder, which ``mpirun`` has
started for it on the same host and which lives as long as it does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elasticstate.config import inherited_environment
from elasticstate.errors import CollectiveError
from elasticstate.worker.contexts.mpi.library import MPI

_LOOK_INTERVAL_S = 0.002
# Without libfabric, whose start sleeps for a second, and by the only one of Open MPI's layers that knows of failures.
_DEFAULTS = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct"}


def take_identity(path: Path, deadline: float, check: Callable[[], None]) -> None:
    """Wait for what the holder writes to ``path``, and make it this process's. Raises CollectiveError without it."""
    while not path.exists():
        check()
        if time.monotonic() > deadline:
            raise CollectiveError(f"mpirun has started no holder of an identity in time ({path})")
        time.sleep(_LOOK_INTERVAL_S)
    told = json.loads(path.read_text())
    path.unlink()
    in_memory = {"OMPI_MCA_btl_sm_backing_directory": str(path.parent)}  # and gone with the job
    os.environ.update({**told, **in_memory})


def start_mpi() -> MPI.Intracomm:
    """MPI_Init with this process's identity, with all others of the same job. Returns the world of that job."""
    given = inherited_environment()
    os.environ.update({name: value for name, value in _DEFAULTS.items() if name not in given})
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI.COMM_WORLD


def forget_identity(path: Path) -> None:
    """Nobody waits for it any more."""
    with suppress(FileNotFoundError):
        path.unlink()
