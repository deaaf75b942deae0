"""Holds an identity for a worker: ``python -I -S holder.py PID PATH``, started by ``mpirun``.

Writes what the environment says of this process for MPI to PATH, and ends when process PID does; with PID 0, that of a
worker on another host, when it is killed. Imports nothing of ours, and little else: there is one for each worker.
"""

import ctypes
import json
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PREFIXES = ("PMIX_", "OMPI_", "OPAL_", "PRTE_")


def end_with_mpirun() -> None:
    """This process is killed when its parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    end_with_mpirun()
    pid, path = int(sys.argv[1]), sys.argv[2]
    try:
        worker = os.pidfd_open(pid) if pid else None
    except ProcessLookupError:
        return
    told = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    with open(f"{path}.{os.getpid()}", "w") as file:
        json.dump({"pid": os.getpid(), "environment": told}, file)
    os.rename(file.name, path)
    select.select([worker] if worker is not None else [], [], [])


if __name__ == "__main__":
    main()
