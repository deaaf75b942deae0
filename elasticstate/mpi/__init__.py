"""The MPI backend: MPI with ULFM, through mpi4py and Open MPI 5. All of elasticstate that concerns MPI is here.

- ``driver_part``: part of the driver. It starts ``mpirun``, and sends identities to the agents.
- ``agent_part``: part of each agent. It gives identities to its workers, and connects them to ``mpirun``.
- ``worker``: part of each worker, the process groups of torch over MPI. No other module here imports torch.
- ``broker``, ``holder``: processes that ``mpirun`` starts, on the driver's host only.
- ``installation``: search for the MPI of this machine; ``trial`` is the program that tries it.

::

    driver ── starts ──► mpirun ──► broker.py      requests more processes from mpirun, the PMIx server
                            └─────► holder.py ...  one for each worker of the job: holds its MPI identity; ends with it

    worker ── tunnel of its agent ══ relay in broker.py ── mpirun      from other hosts (broker.py)

A worker stays a child of its agent, as with any other backend. But it connects to the PMIx server as if it were the
process that ``mpirun`` has started: workers that start MPI by themselves cannot be joined (docs/decisions/mpi.md).
"""
