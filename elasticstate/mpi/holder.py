"""Holds an identity for a worker: ``python -I -S holder.py PID PATH``, started by ``mpirun``.

Writes what the environment says of this process for MPI to PATH, and ends when process PID does. Imports nothing of
ours, and little else: there is one beside each worker.
"""

import ctypes
import json
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PREFIXES = ("PMIX_", "OMPI_", "OPAL_", "PRTE_")


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    pid, path = int(sys.argv[1]), sys.argv[2]
    try:
        worker = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    told = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    with open(f"{path}.{os.getpid()}", "w") as file:
        json.dump(told, file)
    os.rename(file.name, path)
    select.select([worker], [], [])


if __name__ == "__main__":
    main()
