"""Horovod's API for PyTorch over elasticstate: ``import elasticstate.horovod as hvd``. elasticrun starts the script.

The package duplicates nothing: worlds, states and commits are elasticstate's, collectives are torch.distributed's.
Collectives are matched by the order of the calls; asynchronous ones also by name. All ranks compare their calls, and
raise the same error if the calls differ. MIGRATION.md has the tables.
"""

from __future__ import annotations

from elasticstate.horovod import elastic, functions, mpi_ops
from elasticstate.horovod.elastic.state import HostsUpdatedInterrupt
from elasticstate.horovod.functions import *  # noqa: F403
from elasticstate.horovod.launch import run
from elasticstate.horovod.mpi_ops import *  # noqa: F403
from elasticstate.horovod.optimizer import DistributedOptimizer
from elasticstate.horovod.sync_batch_norm import SyncBatchNorm

__all__ = ["DistributedOptimizer", "HostsUpdatedInterrupt", "SyncBatchNorm", "elastic", "run"]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
