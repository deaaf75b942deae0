"""What runs under ``mpirun``: the identities of MPI processes for workers that agents start. On the driver's host only.

::

    driver ── starts ──► mpirun ──► broker.py      asks the PMIx server, which mpirun is, for more processes
                            └─────► holder.py ...  one for each worker of the job: who it is for MPI; ends when it ends

    worker ── tunnel of its agent ══ relay in broker.py ── mpirun      from other hosts (net/relay.py)

A worker stays its agent's child: its output, its end, its signals are the agent's, as with any other backend; but it
connects to the PMIx server as if it were the process that ``mpirun`` has started. So ``mpirun`` can start one process
after the other, in jobs of their own, which MPI_Comm_accept and MPI_Comm_connect can join; workers that start MPI on
their own (singletons) could never be joined.
"""
