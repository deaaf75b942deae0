"""LiveValues: a summary of the live values of one rank, for a comparison of ranks of which some hold no commit."""

from __future__ import annotations

import pickle
from collections.abc import Container
from typing import Any

import msgspec
import numpy as np
import torch

from elasticstate._native import checksum
from elasticstate.core.types import CommitId
from elasticstate.state.layout import digest
from elasticstate.state.plan import check_dense, dtype_name
from elasticstate.state.values import Array, Captured, dumps, split_by_kind


class LiveValues:
    """The live values of one rank (see ``divergence.Comparable``). Tensors of a device are copied one by one.

    The values must not change while this object is used.
    """

    def __init__(self, captured: Captured, ticks: int) -> None:
        tensors, arrays, self._objects = split_by_kind(captured)
        for name, tensor in tensors.items():
            check_dense(name, tensor)
        self._arrays: dict[str, Array] = {**tensors, **arrays}
        self._ticks = ticks
        self._checksums: dict[str, int] = {}

    @property
    def newest(self) -> CommitId:
        """The number of completed ticks, in place of the commit that ranks must have in common."""
        return CommitId(0, self._ticks)

    def difference(self, one_copy: bool) -> str:
        """Text for the error if the ranks have different values."""
        if not one_copy:
            return f"Ranks have different values after {self._ticks} ticks of this world"
        return (
            f"Ranks have different values after {self._ticks} ticks of this world, and with --one-copy-per-host a "
            "restore would replace them by those of one worker of each host"
        )

    def summary(self, left_out: Container[str] = ()) -> tuple[int, int, int]:
        """Return what ``Snapshot.summary`` returns for a commit, with other numbers."""
        included = {name: value for name, value in self._arrays.items() if name not in left_out}
        forms = [(name, *_form(value)) for name, value in included.items()]
        found = [self._checksum(name) for name in included]
        blob = np.frombuffer(dumps(self._objects), dtype=np.uint8)
        return _number(forms), _number(found), checksum(blob, 0, len(blob))

    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        """Return what ``Snapshot.details`` returns for a commit."""
        objects: dict[str, Any] = pickle.loads(dumps(self._objects))  # as a newcomer has them
        return {name: (*_form(value), self._checksum(name)) for name, value in self._arrays.items()}, objects

    def _checksum(self, name: str) -> int:
        known = self._checksums.get(name)
        if known is None:
            content = _bytes(self._arrays[name])
            known = self._checksums[name] = checksum(content, 0, len(content))
        return known


def _form(value: Array) -> tuple[str, tuple[int, ...]]:
    is_tensor = isinstance(value, torch.Tensor)
    return dtype_name(value.dtype) if is_tensor else value.dtype.str, tuple(value.shape)  # type: ignore[union-attr]


def _bytes(value: Array) -> Any:
    """Return the bytes of a value in C order, as ``uint8[n]`` on the CPU."""
    if isinstance(value, torch.Tensor):
        return _flat(value.detach().cpu())
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _flat(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order, as ``uint8[n]`` on its device."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.reshape(-1).view(torch.uint8)


def has_same_bytes(live: Array, stored: Array) -> bool:
    """Return True if both have the same dtype, shape and bytes. The comparison runs on the device of ``live``."""
    if _form(live) != _form(stored):
        return False
    if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor):
        return torch.equal(_flat(live), _flat(stored).to(live.device))
    return bool(np.array_equal(_bytes(live), _bytes(stored)))


def _number(value: object) -> int:
    """Return a 63-bit hash of a value."""
    return digest(msgspec.msgpack.encode(value)) >> 1
