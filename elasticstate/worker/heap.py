"""Memory that a worker frees stays with the process, up to a limit, for the next world.

A change of worlds frees gradients and the buckets of DistributedDataParallel, and the next step needs as much again.
By default, glibc returns freed memory at the end of its heap to the kernel if that is more than twice the largest freed
block, at most 64 MiB (mallopt(3), M_TRIM_THRESHOLD). Then the first steps of the next world wait for fresh pages.
"""

from __future__ import annotations

import ctypes

import torch

from elasticstate.options import tunes_malloc

KEPT_BYTES = 1 << 30
_LARGEST_BYTES = 32 << 20  # of a block of the heap: glibc's own limit, DEFAULT_MMAP_THRESHOLD_MAX
_FILL_BYTES = 16 << 20  # of a block
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h

_keeps = False


def keep_freed_memory() -> None:
    """Keep up to KEPT_BYTES of freed blocks. Do nothing without glibc, or if the user has set options of ``malloc``.

    Larger blocks than 32 MiB are returned to the kernel at once, as always.
    """
    global _keeps
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or tunes_malloc():
        return
    set_option(_MMAP_THRESHOLD, _LARGEST_BYTES)  # glibc stops adapting this limit when one of the options is set
    set_option(_TRIM_THRESHOLD, KEPT_BYTES)
    _keeps = True


def fill(size_bytes: int) -> None:
    """Write to ``size_bytes`` of fresh memory, KEPT_BYTES at most, and free it, so that later blocks are not fresh.

    A worker that joins a running job calls it before its first READY: the others wait for its first step.
    """
    if _keeps and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        count = min(size_bytes, KEPT_BYTES) // _FILL_BYTES
        _ = [torch.zeros(_FILL_BYTES, dtype=torch.uint8) for _ in range(count)]
