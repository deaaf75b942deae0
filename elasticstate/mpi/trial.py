"""Program that prints facts about the MPI library of mpi4py, as JSON objects, one per line.

With ``--trial FILE``, two processes run, started by mpirun. The second one is killed. The first one continues, if it
can, and writes the result to FILE, because mpirun may end before it forwards printed text. MPI is never finalized:
after the death of a process that may hang, and nothing here needs it.

It imports little, because three of these processes run at the start of each job with MPI.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TextIO


def main() -> None:
    try:
        import mpi4py
    except ImportError:
        return
    mpi4py.rc.initialize = False
    if sys.argv[1:2] == ["--trial"]:
        with open(sys.argv[2], "a", encoding="utf-8") as file:
            _try(file)
        return
    _report(mpi4py=mpi4py.__version__)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _report(error=" ".join(str(error).splitlines()[-1:]))
        return
    _report(version=MPI.Get_library_version(), library=_library())


def _try(file: TextIO) -> None:
    from mpi4py import MPI

    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    if world.rank == 0:
        _report(file, size=world.size, thread_multiple=level == MPI.THREAD_MULTIPLE)
    if world.size != 2:
        return
    try:
        both = world.Dup()
        both.Set_errhandler(MPI.ERRORS_RETURN)
        both.Barrier()
        if both.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            both.Barrier()
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                raise
        both.Revoke()
        _report(file, has_survived=both.Shrink().size == 1)
    except (MPI.Exception, NotImplementedError) as error:
        _report(file, error=" ".join(str(error).split()) or type(error).__name__)


def _library() -> str:
    """Return the file that the MPI library was loaded from: proc_pid_maps(5)."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libmpi" in line}
    return min(paths, key=len, default="")


def _report(file: TextIO = sys.stdout, /, **facts: object) -> None:
    print(json.dumps(facts), file=file, flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
