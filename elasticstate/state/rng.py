"""The random state of a worker: python's, numpy's and torch's (CPU, and the present CUDA device if there is one).

It belongs to each rank's commit and is never copied to another rank: a newcomer's is derived.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch


def capture() -> bytes:
    """The present random state. ``apply`` brings it back."""
    cuda = torch.cuda.get_rng_state() if _has_cuda() else None
    return _pack(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)


def derived(root_seed: int, worker_key: str, generation: int) -> bytes:
    """A newcomer's random state: a function of the root's seed, the newcomer's id and the generation it joins in.

    The generation is in it, because a worker that falls behind and joins again must not draw the same numbers again.
    """
    digest = hashlib.sha256(f"{root_seed}/{worker_key}/{generation}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1  # torch takes what fits into a signed 64-bit integer
    cuda = torch.Generator("cuda").manual_seed(seed).get_state() if _has_cuda() else None
    return _pack(
        random.Random(seed).getstate(),
        np.random.RandomState(seed % 2**32).get_state(),
        torch.Generator().manual_seed(seed).get_state(),
        cuda,
    )


def apply(packed: bytes) -> None:
    """Set the random state to what ``capture`` or ``derived`` gave."""
    python, numpy, cpu, cuda = pickle.loads(packed)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch.from_numpy(cpu))
    if cuda is not None:
        torch.cuda.set_rng_state(torch.from_numpy(cuda))


def _pack(python: Any, numpy: Any, cpu: torch.Tensor, cuda: torch.Tensor | None) -> bytes:
    return pickle.dumps((python, numpy, cpu.numpy(), None if cuda is None else cuda.numpy()), protocol=5)


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
