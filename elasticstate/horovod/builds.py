"""What this installation has, and what it uses: asked for by scripts that choose by it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_built() -> bool:
    """Whether torch has its MPI backend."""
    return bool(dist.is_mpi_available())


def gloo_built() -> bool:
    """Whether torch has its Gloo backend."""
    return bool(dist.is_gloo_available())


def nccl_built() -> bool:
    """Whether torch has its NCCL backend."""
    return bool(dist.is_nccl_available())


def ccl_built() -> bool:
    """oneCCL: no."""
    return False


def ddl_built() -> bool:
    """IBM's DDL: no."""
    return False


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


def mpi_enabled() -> bool:
    """Whether the present world talks by MPI. False outside a world."""
    return dist.is_initialized() and "mpi" in str(dist.get_backend())


def gloo_enabled() -> bool:
    """Whether the world forms without MPI."""
    return not mpi_enabled()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: nothing here relies on it."""
    return False
