"""``mpirun -n 1 python -m elasticstate.mpi.broker DIRECTORY``: has holders started for the workers that ask for one.

Requests come by a FIFO in the directory of the job, a line of JSON each: a list of [host or null, process id, path].
This process ends, and ``mpirun`` with it, when the directory of the job is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elasticstate.mpi import holder

if TYPE_CHECKING:
    from elasticstate.mpi.pmix import Pmix

REQUESTS = "mpi.requests"
_LOOK_INTERVAL_MS = 1000


def main() -> None:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI  # noqa: F401 (loads the library that PMIx comes with)

    from elasticstate.mpi.pmix import Pmix

    directory = Path(sys.argv[1])
    pmix = Pmix()
    requests = os.open(directory / REQUESTS, os.O_RDWR | os.O_NONBLOCK)  # for writing, too: no end of file
    unread = b""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while directory.exists():
        if not poll.poll(_LOOK_INTERVAL_MS):
            continue
        *lines, unread = (unread + os.read(requests, 1 << 16)).split(b"\n")
        for line in lines:
            _start_holders(pmix, line)
    os.kill(os.getppid(), signal.SIGKILL)


def _start_holders(pmix: Pmix, line: bytes) -> None:
    try:
        pmix.spawn([_command(*member) for member in json.loads(line)])
    except RuntimeError as error:  # who has asked waits in vain; the end of this process would be that of all workers
        print(f"elasticstate: no holders for {line.decode()}: {error}", file=sys.stderr, flush=True)


def _command(host: str | None, pid: int, path: str) -> tuple[str | None, list[str], str]:
    return host, [sys.executable, "-I", "-S", holder.__file__, str(pid), path], "/"


if __name__ == "__main__":
    main()
