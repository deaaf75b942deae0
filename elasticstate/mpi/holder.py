"""``python -I -S holder.py PID PATH``, started by ``mpirun``: hold an MPI identity for a worker.

The holder writes its MPI environment variables to PATH and ends when process PID ends. PID 0 means a worker on another
host: then the holder ends when it is killed. It imports no module of this package and few others, because each worker
has a holder.
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
    """Let the kernel kill this process when its parent ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    end_with_mpirun()
    pid, path = int(sys.argv[1]), sys.argv[2]
    try:
        worker = os.pidfd_open(pid) if pid else None
    except ProcessLookupError:
        return
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    with open(f"{path}.{os.getpid()}", "w") as file:
        json.dump({"pid": os.getpid(), "environment": variables}, file)
    os.rename(file.name, path)
    select.select([worker] if worker is not None else [], [], [])


if __name__ == "__main__":
    main()
