"""Identity of this process for MPI: a member of a job of the PMIx server in ``mpirun`` (see mpi/__init__.py).

A process that an agent has started becomes a member of that job with the environment of a holder. ``mpirun`` has
started the holder for this process, and the holder lives as long as the process. The driver reads that environment, and
the agent writes it to a file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from elasticstate.errors import CollectiveError
from elasticstate.mpi.worker.library import MPI
from elasticstate.net.names import interface_of, is_loopback
from elasticstate.options import inherited_environment
from elasticstate.private import open_directory, read_file

_LOOK_INTERVAL_S = 0.002


def take_identity(path: Path, deadline: float, check: Callable[[], None]) -> None:
    """Wait for the identity at ``path``, and apply it to this process. Raises CollectiveError after ``deadline``."""
    while not path.exists():
        check()
        if time.monotonic() > deadline:
            raise CollectiveError(f"mpirun supplied no identity in time: {path} does not exist")
        time.sleep(_LOOK_INTERVAL_S)
    directory = open_directory(path.parent)  # refuses a directory that another user has put there
    try:
        variables = json.loads(read_file(directory, path.name))
        os.unlink(path.name, dir_fd=directory)
    finally:
        os.close(directory)
    in_memory = {"OMPI_MCA_btl_sm_backing_directory": str(path.parent)}  # removed with the job
    os.environ.update({**variables, **in_memory})


def settings(local_address: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return Open MPI's settings for a host with address ``local_address``, without those that the user has ``given``.

    They exclude libfabric, whose start sleeps for a second, and select ob1, the only layer that detects failures. On
    several hosts, all processes use TCP, because ``mpirun`` takes all of them for processes of its own host.
    """
    wanted = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct" if is_loopback(local_address) else "self,tcp"}
    interface = interface_of(local_address)
    if interface is not None and "OMPI_MCA_btl_tcp_if_exclude" not in given:  # Open MPI accepts only one of the two
        wanted["OMPI_MCA_btl_tcp_if_include"] = interface
    return {name: value for name, value in wanted.items() if name not in given}


def start_mpi(local_address: str) -> MPI.Intracomm:
    """Call MPI_Init with this process's identity, with all others of the same job. Return the world of that job."""
    if not MPI.Is_initialized():
        os.environ.update(settings(local_address, inherited_environment()))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI.COMM_WORLD


def forget_identity(path: Path) -> None:
    """Remove the identity file, which no process waits for any more."""
    with suppress(FileNotFoundError):
        path.unlink()
