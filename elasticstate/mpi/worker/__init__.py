"""Part of the MPI backend in a worker. mpi4py is loaded here, but not started.

* ``mpi_context.py``: the backend, and the groups of a generation
* ``world_builder.py``: the identity of a process for MPI; the communicator of a world, built from that of the last one
* ``group.py``: torch's collectives as MPI calls, and running operations
"""

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False  # MPI_Finalize would wait for dead members

from elasticstate.mpi.worker.mpi_context import MpiBackend as MpiBackend  # noqa: E402
