"""Private names of tensors. Checked with torch 2.11 to 2.15.

- ``torch._foreach_copy_``: copies many tensors in one call; 100 small ones in less than half the time of single copies
  (on a CPU), and with one kernel instead of 100 on a GPU.
- ``Tensor._version``: the number of writes in place, which autograd checks, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from elasticstate._native import counters_of, integers_of
from elasticstate.compat import warn_absent, warn_unchecked

_foreach_copy: Any = getattr(torch, "_foreach_copy_", None)

_VERSION = "_version"
version_of: Callable[[torch.Tensor], int] = attrgetter(_VERSION)
"""Return the number of writes to the tensor's memory, as far as torch counts them."""


def version_descriptor() -> object:
    """Return the descriptor of the attribute that ``version_of`` reads, for native code that reads many."""
    return getattr(torch.Tensor, _VERSION)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
    """Copy each source to the target at the same position, of the same shape."""
    if _foreach_copy is not None and targets:
        _foreach_copy(list(targets), list(sources), non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def has_versions() -> bool:
    """Return True if ``version_of`` works; else warn once."""
    if hasattr(torch.Tensor, _VERSION):
        return True
    warn_absent("torch", f"torch.Tensor.{_VERSION}", "training stops while a commit is copied from a device")
    return False


# ------------------------------------------------------------------------------------------------------------- versions
# Versions of many tensors at once: 3 ns for each, where the attribute ``Tensor._version`` takes 50 ns.
#
# Where torch keeps a tensor's version is not part of its interface. So the place is found in the running process,
# with tensors whose versions are known; without exactly one place there is none. A proof must end with
# ``exact_versions``: a wrong place can then make it fail, but nothing else.


_SAMPLE_VERSIONS = (101, 61, 37)
_OBJECT_BYTES, _TENSOR_BYTES, _COUNTER_BYTES = 40, 256, 32  # in which a place is looked for


class _Place(NamedTuple):
    """Offsets in bytes of the pointers on the way to a version, and of the version in the last object."""

    in_object: int
    in_content: int
    in_counter: int


def exact_versions(tensors: list[torch.Tensor]) -> bytes:
    """Return the versions as int64[n]. Raises RuntimeError for tensors that have none (of ``inference_mode``)."""
    return integers_of(tensors, version_descriptor())


def quick_versions(tensors: list[torch.Tensor]) -> bytes:
    """Return what ``exact_versions`` returns, if the place of the versions is known, see above."""
    place = _place()
    return exact_versions(tensors) if place is None else counters_of(tensors, *place)


def requires_grad_of(tensors: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    """Return ``requires_grad`` of many tensors, as int64[n]. The place of their content only makes this quicker."""
    place = _place()
    flags = integers_of(tensors, torch.Tensor.requires_grad, 0 if place is None else place.in_object)
    return np.frombuffer(flags, np.int64)


@functools.cache
def _place() -> _Place | None:
    """Return the place of a tensor's version; None if there is not exactly one candidate."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            tensors = [torch.zeros(1, device="cpu") for _ in _SAMPLE_VERSIONS]
            tensors.append(torch.nn.Parameter(torch.zeros(1, device="cpu")))
            with torch.no_grad():
                for tensor, version in zip(tensors, (*_SAMPLE_VERSIONS, 23), strict=True):
                    for _ in range(version):
                        tensor.zero_()
                found = set.intersection(*(set(_candidates(memory.fileno(), tensor)) for tensor in tensors))
                for tensor in tensors:
                    tensor.zero_()
    except OSError:
        return None
    same = [place for place in found if counters_of(tensors, *place) == exact_versions(tensors)]
    return same[0] if len(same) == 1 else None


def _candidates(memory: int, tensor: torch.Tensor) -> Iterator[_Place]:
    """Yield the places at which there is the version of ``tensor``. ``memory``: descriptor of this process's memory."""
    version = tensor._version
    for in_object in range(object.__basicsize__, _OBJECT_BYTES, 8):
        (content,) = _read(memory, id(tensor) + in_object, "Q") or (0,)
        pointers = _read(memory, content, f"{_TENSOR_BYTES // 8}Q") or ()
        for number, pointer in enumerate(pointers):
            for index, value in enumerate(_read(memory, pointer, f"{_COUNTER_BYTES // 4}I") or ()):
                if value == version:
                    yield _Place(in_object, number * 8, index * 4)


def _read(memory: int, address: int, layout: str) -> tuple[int, ...] | None:
    """Return the integers at ``address``; None if nothing is there."""
    try:
        return struct.unpack(layout, os.pread(memory, struct.calcsize(layout), address))
    except (OSError, OverflowError, struct.error):
        return None


# -------------------------------------------------------------------------------------------------------------- aliases
# Detection of writes that torch's version counter does not count. Checked with torch 2.11 to 2.15: ``can_watch``.
#
# A write through ``tensor.data``, a numpy array, a storage, DLPack or a collective changes no version. Each of these
# needs a *handle* first: another object that refers to the tensor's memory. This module detects who asks for a handle
# to watched memory, by replacing the attributes of ``torch.Tensor`` and ``ProcessGroup`` that return or use one.
#
# - ``torch.Tensor.data``, ``numpy``, ``untyped_storage``, ``set_``, ``__dlpack__``; ``torch.utils.dlpack.to_dlpack``;
#   ``apply_`` and ``map_``, which write themselves.
# - Methods of ``ProcessGroup`` and ``Backend``, and ``Work.wait``: c10d operations have no alias annotations
#   (torch/csrc/distributed/c10d/Ops.cpp).
# - ``torch._C._storage_Use_Count`` and the references to the storage object: who refers to a tensor's memory.
# - ``torch._fused_adam_`` and the like count as a write of all memory.
#
# Not detected: native code that writes to an address, memory that torch has not allocated (``is_own_memory``),
# ``.data`` inside a compiled function (``torch.compile``, ``torch.jit.script``), operations of
# ``torch.ops._c10d_functional``, capsules made before ``install``, and
# ``torch.autograd._unsafe_preserve_version_counter``. Tick records therefore also take samples of the content.


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_storage_of = torch.Tensor.untyped_storage
_ONLY_OWNER = 2  # the tensor, and its storage object
_ONLY_REFERENCES = 3  # to the storage object: of its tensor, of a variable, and of the argument of getrefcount

_COLLECTIVES = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "scatter", "all_gather_single"),
    *("all_gather_single_coalesced", "all_to_all_single", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


class _Collective:
    """A collective, from before its first write on. Another thread may end a tick meanwhile."""

    def __init__(self) -> None:
        self.work: Any = None  # until the call has returned
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over or (self.work is not None and self.work.is_completed())


_addresses: frozenset[int] = frozenset()  # beginnings of the watched storages
_handles: dict[int, list[_Collective | None]] = {}  # address -> collectives that use the memory; None: a handle
_lasting: dict[int, set[StorageWeakRef]] = {}  # by address, storages with a handle whose end cannot be detected
_lasting_lock = threading.Lock()  # for changes: any thread may make a capsule
_in_flight: list[tuple[int, _Collective]] = []  # by address, whoever watches
_watches = 0  # calls of ``watch``
_unseen_writes = 0
_is_installed = False


def can_watch() -> bool:
    """Return True if the installed torch was checked, and has all names that the detection needs; else warn once."""
    effect = "a failure repeats the steps since the last commit"
    if warn_unchecked("torch", effect):  # it may have ways to write that no version counts
        return False
    if _use_count is not None and hasattr(torch.Tensor, "_version"):
        return True
    name = "torch.Tensor._version" if _use_count is not None else "torch._C._storage_Use_Count"
    warn_absent("torch", name, effect)
    return False


def watch(tensors: Iterable[torch.Tensor]) -> int:
    """Watch the memory of these tensors, instead of those watched before, and return a number for this watch.

    Of the handles asked for before, only collectives in flight since ``install`` are known.
    """
    global _addresses, _watches
    install()
    _watches += 1
    _addresses = frozenset(_storage_of(tensor).data_ptr() for tensor in tensors)
    _handles.clear()
    _prune()
    for address, collective in _in_flight:
        if address in _addresses:
            _handles.setdefault(address, []).append(collective)
    return _watches


def unseen_writes() -> int:
    """Return how often something wrote memory that torch counts no writes of, and nobody knows which memory."""
    return _unseen_writes


def note_unseen_write() -> None:
    """Record such a write, for example a commit that is about to be copied into live tensors."""
    global _unseen_writes
    _unseen_writes += 1


def is_only_owner(tensor: torch.Tensor) -> bool:
    """Return True if no other tensor, storage object or process refers to the tensor's memory."""
    storage = _storage_of(tensor)
    assert _use_count is not None, "can_watch() returned True"
    if sys.getrefcount(storage) != _ONLY_REFERENCES or _use_count(storage._cdata) != _ONLY_OWNER:
        return False
    return not storage.is_shared() and not _has_lasting_handle(storage.data_ptr())


def is_own_memory(tensor: torch.Tensor) -> bool:
    """Return True if torch has allocated the tensor's memory, and has lent it to no numpy array.

    Other code may write other memory without a call of torch: what numpy has allocated, a file, foreign buffers.
    """
    return bool(_storage_of(tensor).resizable())


def _has_lasting_handle(address: int) -> bool:
    """Return True if there may be a handle whose end cannot be detected. New memory at the same address has none."""
    storages = tuple(_lasting.get(address, ()))
    return not all(storage.expired() for storage in storages)  # type: ignore[no-untyped-call]


def has_handles(watch: int) -> bool:
    """Return True if somebody asked for a handle to watched memory since ``watch`` or ``forget_handles``, or if other
    memory is watched now."""
    return bool(_handles) or watch != _watches


def forget_handles(watch: int, tensors: Iterable[torch.Tensor]) -> bool:
    """Forget the handles to these tensors, given to ``watch``, that no longer exist. Return False if any exists, or if
    other memory is watched now."""
    _prune()
    if watch != _watches:
        return False
    if not _handles:
        return True
    for tensor in tensors:
        address = _storage_of(tensor).data_ptr()
        users = _handles.get(address)
        if users is not None and is_only_owner(tensor) and all(user is None or user.is_completed() for user in users):
            del _handles[address]
    return not _handles


def release_works() -> None:
    """Release the works of all collectives: they keep the process group of an ended generation alive.

    Call it when nothing is in flight any more. Watched memory that they used still counts as used.
    """
    _in_flight.clear()
    for users in _handles.values():
        users[:] = [None]


# ------------------------------------------------------------------------------------------------------ replacements


def _storage_address(value: Any) -> int | None:
    """Return the beginning of a CPU tensor's storage; None for anything else."""
    if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None  # a FakeTensor warns, and a DTensor has no memory of its own
    try:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse the call
            return _storage_of(value).data_ptr() if value.is_cpu else None
    except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, or a subclass
        return None


def _address_of(value: Any) -> int | None:
    """Return the beginning of a tensor's storage if it is watched; None for anything else."""
    address = _storage_address(value) if _addresses else None
    return address if address in _addresses else None


def _note(value: Any) -> None:
    address = _address_of(value)
    if address is not None:
        _handles.setdefault(address, []).append(None)


def _note_for_ever(value: Any) -> None:
    """Note a DLPack capsule, which the use count of its storage does not include. It keeps the storage alive."""
    _note(value)
    if (address := _address_of(value)) is not None:
        storage = StorageWeakRef(_storage_of(value))  # type: ignore[no-untyped-call]
        with _lasting_lock:
            _lasting.setdefault(address, set()).add(storage)


def _prune() -> None:
    """Forget collectives that are complete, as their works keep tensors alive, and storages that are free."""
    if _lasting:
        with _lasting_lock:
            for address in [address for address in _lasting if not _has_lasting_handle(address)]:
                del _lasting[address]
    for entry in [entry for entry in _in_flight if entry[1].is_completed()]:
        with contextlib.suppress(ValueError):  # another thread was faster
            _in_flight.remove(entry)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def install() -> None:
    """Replace the attributes, once in this process."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _replace_data()
    for name in ("numpy", "untyped_storage", "set_", "apply_", "map_", "map2_"):
        _replace(torch.Tensor, name, _noting(_note))
    for name in dir(torch):
        if name.startswith("_fused_") and name.endswith("_"):
            _replace(torch, name, _noting(lambda _: note_unseen_write()))
    _replace(torch.Tensor, "__dlpack__", _noting(_note_for_ever))
    for module in (torch.utils.dlpack, torch, torch._C):
        for name in ("to_dlpack", "_to_dlpack", "_to_dlpack_versioned"):
            _replace(module, name, _noting(_note_for_ever))
    for owner in (dist.ProcessGroup, getattr(torch._C._distributed_c10d, "Backend", None)):
        for name in _COLLECTIVES:
            _replace(owner, name, _noting_work)
    _replace(dist.Work, "wait", _noting_end)


def _replace(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if hasattr(owner, name):
        setattr(owner, name, wrapper(getattr(owner, name)))


def _replace_data() -> None:
    original: Any = torch.Tensor.data

    def get(self: torch.Tensor) -> torch.Tensor:
        _note(self)
        found: torch.Tensor = original.__get__(self)
        return found

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        _note(self)
        _note(value)
        original.__set__(self, value)

    torch.Tensor.data = property(get, put, original.__delete__)  # type: ignore[assignment]


def _noting(note: Callable[[Any], object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of functions that calls ``note`` for each argument first."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                note(value)
            return original(*args, **kwargs)

        return noting

    return wrapper


def _noting_work(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = map(_storage_address, _tensors_in((*args, *kwargs.values())))
        addresses = {address for address in found if address is not None}
        _prune()
        collective = _Collective()
        _in_flight.extend((address, collective) for address in addresses)
        for address in addresses & _addresses:
            _handles.setdefault(address, []).append(collective)
        try:
            collective.work = work = original(self, *args, **kwargs)
        finally:
            collective.is_over = not hasattr(collective.work, "is_completed")
        return work

    return noting


def _noting_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo's reduce-scatter of a tensor does its part in ``wait``, and never counts as completed (LambdaWork in
    ProcessGroupGloo.cpp). It keeps its tensors alive."""

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        for _, collective in list(_in_flight) if found else ():
            if collective.work is self:
                collective.is_over, collective.work = True, None
        return found

    return noting
