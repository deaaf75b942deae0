"""mpi4py, loaded but not started: ``from elasticstate.mpi.worker.library import MPI``.

MPI_Finalize is never called: it would wait for dead members.
"""

from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI as MPI  # noqa: E402 (as mpi4py wants it)
