"""The collectives, as in ``horovod.torch.mpi_ops``, for scripts that import that module."""

from elasticstate.horovod import *  # noqa: F403 - the same names
