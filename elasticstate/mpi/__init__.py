"""Programs that run under ``mpirun``, on the driver's host only: they hold MPI identities for workers of agents.

::

    driver ── starts ──► mpirun ──► broker.py      requests more processes from mpirun, the PMIx server
                            └─────► holder.py ...  one for each worker of the job: holds its MPI identity; ends with it

    worker ── tunnel of its agent ══ relay in broker.py ── mpirun      from other hosts (net/relay.py)

A worker stays a child of its agent, which handles its output, end and signals as with any other backend. But the
worker connects to the PMIx server as if it were the process that ``mpirun`` has started. So ``mpirun`` can start one
process after the other, each in an MPI job of its own, and MPI_Comm_accept and MPI_Comm_connect can join them. Workers
that start MPI without mpirun (singletons) cannot be joined.
"""
