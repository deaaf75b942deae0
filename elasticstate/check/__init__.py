"""``elasticrun --check``: print what is available on this machine and on the named hosts.

This process loads neither torch nor MPI: children load them, and may crash or hang.
"""
