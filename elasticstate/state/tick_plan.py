"""Plan of a tick record: which tensors of a state are copied at each tick, and what is known of the others.

See tick_record.py for the kinds of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch

from elasticstate._native import checksum, sample
from elasticstate.compat import aliases
from elasticstate.compat.tensors import copy_all
from elasticstate.compat.versions import exact_versions, quick_versions
from elasticstate.state.quick_capture import QuickCapture
from elasticstate.state.values import Captured, split_by_kind

LARGE_BYTES = 1 << 18
"""A larger tensor that cannot be watched is not copied before it was seen to change."""
MAX_BYTES = 8 << 20
"""Limit of what a record copies: beyond it, the commits alone count."""
_SAMPLED = 64  # owned tensors of which samples are taken at a tick
_WORDS = 4  # of eight bytes, of each of them


class Unsuitable(Exception):
    """The state has no tick record for now. The message gives the reason, as a clause."""


class NotSupported(Exception):
    """The state never has a tick record. The message gives the reason, as a clause."""


@dataclass(slots=True)
class Copies:
    """One of the two sets of copies, which are written in turn."""

    tensors: list[torch.Tensor]
    arrays: dict[str, np.ndarray[Any, Any]]


class TickPlan:
    """The kinds of a state's tensors (see above). Valid as long as ``fits`` returns True.

    Args:
        captured: the live values.
        owned: ids of the tensors that only an optimizer's ``step`` writes.
        changing: names of other tensors that were seen to change.

    Raises Unsuitable or NotSupported.
    """

    def __init__(self, captured: Captured, owned: Container[int], changing: Container[str]) -> None:
        tensors, arrays, _ = split_by_kind(captured)
        self.tensors, self.arrays = tensors, arrays
        self.quick: QuickCapture | None = None
        self.owned: dict[str, torch.Tensor] = {}
        self.summed: dict[str, torch.Tensor] = {}
        self.copied: list[str] = []
        self._may_be_copied: list[str] = []  # of the summed ones
        size = sum(array.nbytes for array in arrays.values())
        for name, tensor in tensors.items():
            _check_kind(name, tensor)
            is_owned = id(tensor) in owned and tensor.numel() > 0 and not tensor.is_inference()
            can_be_watched = is_owned and aliases.is_own_memory(tensor)
            if can_be_watched and aliases.is_only_owner(tensor):
                self.owned[name] = tensor
            elif tensor.nbytes <= LARGE_BYTES or (name in changing and not is_owned):
                self.copied.append(name)
                size += tensor.nbytes
            elif can_be_watched:
                raise Unsuitable(f"state.{name} shares its memory with another tensor or an array")
            else:
                self.summed[name] = tensor
                if not is_owned:
                    self._may_be_copied.append(name)
        if size > MAX_BYTES:
            raise Unsuitable(f"{size / 1e6:.0f} MB would have to be copied at each tick")
        self._owned_now, self._summed_now = list(self.owned.values()), list(self.summed.values())
        self._features = _features([*self._owned_now, *self._summed_now])
        dense = [tensor for tensor in self._owned_now if _is_dense(tensor)]
        self._dense_count = len(dense)
        self._sampled = dense + dense[:_SAMPLED]  # so that any _SAMPLED in a row, over the end, are one slice
        self._is_quick = quick_versions(self._owned_now) == exact_versions(self._owned_now)
        self._spare = [Copies([], {}), Copies([], {})]
        self._watch = 0

    def fits(self, tensors: dict[str, torch.Tensor], arrays: dict[str, np.ndarray[Any, Any]]) -> bool:
        """Return True if these are the values that the plan was made for."""
        return list(tensors) == list(self.tensors) and list(arrays) == list(self.arrays) and self.has_same(tensors)

    def has_same(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Return True if the owned and the summed tensors are still at their names and addresses."""
        found = [tensors.get(name) for name in (*self.owned, *self.summed)]
        expected = [*self._owned_now, *self._summed_now]
        return all(map(is_, found, expected)) and _features(expected) == self._features

    def versions(self) -> bytes:
        """Return the versions of the owned tensors, for a comparison with ``exact_versions``."""
        return quick_versions(self._owned_now) if self._is_quick else self.exact_versions()

    def exact_versions(self) -> bytes:
        """Return the versions of the owned tensors as torch gives them."""
        return exact_versions(self._owned_now)

    def samples(self, tick: int) -> int:
        """Return a checksum of words of some owned tensors; ``tick`` decides which."""
        first = tick * _SAMPLED % max(1, self._dense_count)
        some = self._sampled[first : first + min(_SAMPLED, self._dense_count)]
        return sample(some, torch.Tensor.data_ptr, torch.Tensor.nbytes, tick, _WORDS)

    def checksums(self) -> dict[str, int]:
        """Return the checksums of the summed tensors, of their whole content."""
        found = {}
        for name, tensor in self.summed.items():
            dense = tensor.detach().contiguous().resolve_conj().resolve_neg()
            found[name] = checksum(dense.reshape(-1).view(torch.uint8), 0, dense.nbytes)
        return found

    def to_copy(self, before: dict[str, int], now: dict[str, int]) -> list[str]:
        """Return the names of the tensors that changed between two ``checksums``, and that a plan may copy instead."""
        return [name for name in self._may_be_copied if name in before and now[name] != before[name]]

    def watch(self) -> None:
        """Detect from now on who asks for a handle to an owned tensor's memory."""
        self._watch = aliases.watch(self._owned_now)

    def has_all_owners(self) -> bool:
        """Return True if no handle exists. Forgets those that no longer exist."""
        return aliases.forget_handles(self._watch, self._owned_now)

    def may_be_written(self) -> bool:
        """Return True if a handle exists, or existed since the last call of ``has_all_owners``."""
        return aliases.has_handles(self._watch)

    def copy(self) -> Copies:
        """Copy the values of the first kind, into the set of copies that the last record does not use."""
        copies, last = self._spare
        self._spare = [last, copies]
        live = [self.tensors[name] for name in self.copied]
        if live:
            with torch.no_grad():
                if all(_are_same(feature, live, copies.tensors) for feature in _COPIED_FEATURES):
                    copy_all(copies.tensors, live)
                else:
                    copies.tensors = [tensor.clone() for tensor in live]
        copies.arrays = {name: array.copy() for name, array in self.arrays.items()}
        return copies


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    is_usual = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # not a subclass with functions of its own
    if not is_usual or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSupported(f"state.{name} is not a dense tensor on the CPU")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill the memory from the tensor's address on."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _are_same(feature: Callable[[torch.Tensor], Any], some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return list(map(feature, some)) == list(map(feature, others))


_COPIED_FEATURES: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.size,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
)


def _features(tensors: list[torch.Tensor]) -> list[object]:
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()) for t in tensors]
