"""Random state of a worker: python's, numpy's and torch's (CPU, and the present CUDA device if CUDA is initialized).

Each rank's commit contains the rank's own random state. It is never copied to another rank: a new worker derives its
own.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import random
from typing import Any, NamedTuple

import numpy as np
import torch


def capture() -> bytes:
    """Return the present random state. ``apply`` restores it."""
    return pack(copy())


class Copied(NamedTuple):
    """A copy of the random state that is cheaper to make than the bytes of ``capture``."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None


def copy() -> Copied:
    """Return a copy of the present random state. ``pack`` makes it the bytes that ``apply`` restores."""
    cuda = torch.cuda.get_rng_state() if _has_cuda() else None
    return Copied(_pythons.copy(), _numpys.copy(), torch.get_rng_state(), cuda)


def pack(copied: Copied) -> bytes:
    cuda = None if copied.cuda is None else copied.cuda.numpy()
    return pickle.dumps((copied.python, copied.numpy, copied.cpu.numpy(), cuda), protocol=5)


class _PythonState:
    """Copies of python's random state. Making one takes 10 us, so it is made only after a change of the memory."""

    _HEAD = object.__basicsize__
    _BYTES = random.Random.mro()[1].__basicsize__ - _HEAD  # of the generator in C

    def __init__(self) -> None:
        self._seen: Any = None
        self._copied: Any = None

    def copy(self) -> Any:
        generator = getattr(random.getstate, "__self__", None)
        if type(generator) is not random.Random:
            return random.getstate()
        second = generator.gauss_next  # type: ignore[attr-defined]  # of the last pair of normal numbers
        seen = generator, second, ctypes.string_at(id(generator) + self._HEAD, self._BYTES)
        if seen != self._seen:
            self._seen, self._copied = seen, random.getstate()
        return self._copied


class _NumpyState:
    """Copies of numpy's random state. Making one takes 100 us, so it is made only after a change.

    A change is detected by the memory of the generator, 2.5 KB, and of the object around it, which has the second
    number of the last pair of normal numbers.
    """

    _BYTES = 624 * 4 + 4  # of mt19937_state: key and position (numpy/random/src/mt19937/mt19937.h)

    def __init__(self) -> None:
        self._seen: Any = None
        self._copied: Any = None

    def copy(self) -> Any:
        state: Any = getattr(getattr(np.random, "mtrand", None), "_rand", None)
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(state) is not np.random.RandomState or type(generator) is not np.random.MT19937:
            return np.random.get_state()
        head, rest = id(state) + object.__basicsize__, type(state).__basicsize__ - object.__basicsize__
        content = ctypes.string_at(head, rest) + ctypes.string_at(generator.ctypes.state_address, self._BYTES)
        if (seen := (state, generator, content)) != self._seen:
            self._seen, self._copied = seen, np.random.get_state()
        return self._copied


_pythons, _numpys = _PythonState(), _NumpyState()


def derived(root_seed: int, worker_key: str, generation: int) -> bytes:
    """Return a new worker's random state, derived from the root's seed, the worker's id and the generation it joins in.

    The generation is included, because a worker that falls behind and joins again must not repeat the same random
    numbers.
    """
    digest = hashlib.sha256(f"{root_seed}/{worker_key}/{generation}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1  # torch accepts seeds that fit into a signed 64-bit integer
    cuda = torch.Generator("cuda").manual_seed(seed).get_state() if _has_cuda() else None
    numpy, cpu = np.random.RandomState(seed % 2**32).get_state(), torch.Generator().manual_seed(seed).get_state()
    return pack(Copied(random.Random(seed).getstate(), numpy, cpu, cuda))


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


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
