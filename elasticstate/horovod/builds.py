"""Features of this installation, for scripts that choose by them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_built() -> bool:
    """Return True if torch has its MPI backend."""
    return bool(dist.is_mpi_available())


def gloo_built() -> bool:
    """Return True if torch has its Gloo backend."""
    return bool(dist.is_gloo_available())


def nccl_built() -> bool:
    """Return True if torch has its NCCL backend."""
    return bool(dist.is_nccl_available())


def ccl_built() -> bool:
    """Return False: oneCCL is not supported."""
    return False


def ddl_built() -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def cuda_built() -> bool:
    """Return True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch was built for ROCm."""
    return torch.version.hip is not None


def mpi_enabled() -> bool:
    """Return True if the present world uses MPI. False outside a world."""
    return dist.is_initialized() and "mpi" in str(dist.get_backend())


def gloo_enabled() -> bool:
    """Return True unless the present world uses MPI."""
    return not mpi_enabled()


def mpi_threads_supported() -> bool:
    """Return False: no code here needs MPI calls from several threads."""
    return False
