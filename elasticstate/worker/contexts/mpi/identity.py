"""Who this process is for MPI: an identity of a job of the PMIx server that ``mpirun`` is (see elasticstate/mpi).

A process that an agent has started becomes a member of that job by the environment of a holder, which ``mpirun`` has
started for it and which lives as long as it does. The driver reads it, and the agent writes it to a file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from elasticstate.config import inherited_environment
from elasticstate.errors import CollectiveError
from elasticstate.net.names import interface_of, is_loopback
from elasticstate.worker.contexts.mpi.library import MPI

_LOOK_INTERVAL_S = 0.002


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


def settings(local_address: str, given: Mapping[str, str]) -> dict[str, str]:
    """Of Open MPI, for a host that others reach at ``local_address``, as far as the user has not ``given`` them.

    Without libfabric, whose start sleeps for a second, and by the only one of its layers that knows of failures. On
    several hosts all speak TCP: for the one ``mpirun`` they are on its own host, which is not to be taken for true.
    """
    wanted = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct" if is_loopback(local_address) else "self,tcp"}
    interface = interface_of(local_address)
    if interface is not None and "OMPI_MCA_btl_tcp_if_exclude" not in given:  # Open MPI takes only one of the two
        wanted["OMPI_MCA_btl_tcp_if_include"] = interface
    return {name: value for name, value in wanted.items() if name not in given}


def start_mpi(local_address: str) -> MPI.Intracomm:
    """MPI_Init with this process's identity, with all others of the same job. Returns the world of that job."""
    if not MPI.Is_initialized():
        os.environ.update(settings(local_address, inherited_environment()))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI.COMM_WORLD


def forget_identity(path: Path) -> None:
    """Nobody waits for it any more."""
    with suppress(FileNotFoundError):
        path.unlink()
