"""``elasticrun --check``: what is available here, and on the hosts that are named.

Nothing of torch or MPI is loaded into this process: what loads them runs in children, which may crash or hang.
"""
