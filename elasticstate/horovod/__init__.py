"""Horovod's API for PyTorch over elasticstate: ``import elasticstate.horovod as hvd``. elasticrun starts the script.

The package duplicates nothing: worlds, states and commits are elasticstate's, collectives are torch.distributed's.
Collectives are matched by the order of the calls; asynchronous ones also by name. All ranks compare their calls, and
raise the same error if the calls differ. MIGRATION.md has the tables.
"""

from __future__ import annotations

from elasticstate.errors import CollectiveError as HorovodInternalError
from elasticstate.horovod import elastic
from elasticstate.horovod.allreduce import (
    Compression,
    Op,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from elasticstate.horovod.collectives import (
    allgather,
    allgather_async,
    allgather_object,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from elasticstate.horovod.elastic.state import HostsUpdatedInterrupt
from elasticstate.horovod.joining import join
from elasticstate.horovod.launch import run
from elasticstate.horovod.negotiation import poll, synchronize
from elasticstate.horovod.optimizer import DistributedOptimizer
from elasticstate.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    init,
    remove_process_set,
)
from elasticstate.horovod.recording import start_timeline, stop_timeline
from elasticstate.horovod.start import broadcast_optimizer_state, broadcast_parameters
from elasticstate.horovod.sync_batch_norm import SyncBatchNorm
from elasticstate.horovod.world import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)

Average, Sum, Min, Max, Product, Adasum = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT, Op.ADASUM

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

from elasticstate.horovod import functions, mpi_ops  # noqa: E402, F401 - they take the names above
