"""Random state of a worker: python's, numpy's and torch's (CPU, and the present CUDA device if CUDA is initialized).

Each rank's commit contains the rank's own random state. It is never copied to another rank: a new worker derives its
own.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch


def capture() -> bytes:
    """Return the present random state. ``apply`` restores it."""
    cuda = torch.cuda.get_rng_state() if _has_cuda() else None
    return _pack(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)


def derived(root_seed: int, worker_key: str, generation: int) -> bytes:
    """Return a new worker's random state, derived from the root's seed, the worker's id and the generation it joins in.

    The generation is included, because a worker that falls behind and joins again must not repeat the same random
    numbers.
    """
    digest = hashlib.sha256(f"{root_seed}/{worker_key}/{generation}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1  # torch accepts seeds that fit into a signed 64-bit integer
    cuda = torch.Generator("cuda").manual_seed(seed).get_state() if _has_cuda() else None
    return _pack(
        random.Random(seed).getstate(),
        np.random.RandomState(seed % 2**32).get_state(),
        torch.Generator().manual_seed(seed).get_state(),
        cuda,
    )


def initial_seed(packed: bytes) -> int:
    """Return what ``torch.initial_seed()`` returned when this random state was captured."""
    _, _, cpu, _ = pickle.loads(packed)
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(cpu))
    return generator.initial_seed()


def apply(packed: bytes) -> None:
    """Set the random state to one that ``capture`` or ``derived`` returned."""
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
