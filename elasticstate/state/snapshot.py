"""Snapshot: the last two commits of one worker, in buffers that may outlive the worker.

A buffer is a safetensors file (see layout.py), and holds a commit if it has a matching seal (``ControlPage``). A new
commit overwrites the older buffer: its seal is removed before the first byte changes, and the new seal is written last.
Buffers are kept as long as they are large enough: the first touch of fresh memory costs several times the copy itself.
"""

from __future__ import annotations

import functools
import hmac
import itertools
import mmap
import operator
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import torch

from elasticstate._native import ControlPage, Pieces, checksum, checksums, equal, fill, gather, gather_each, scatter
from elasticstate.commits import NO_SHARDING, Sharding, commit_tag, header_digest, part_tag
from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError, StateError
from elasticstate.log import logger
from elasticstate.options import commit_device_memory
from elasticstate.state.async_commit import (
    Content,
    Copy,
    CopyOutcome,
    CopyStream,
    CopyStreamOf,
    Item,
    copy_stream_of,
    has_copy_stream,
)
from elasticstate.state.layout import (
    ALIGNMENT_BYTES,
    Checksums,
    Entry,
    Frame,
    Header,
    Layout,
    lay_out,
    number_of,
    parse_header,
    round_up,
    unusual_strides,
    view,
)
from elasticstate.state.values import Array, Captured, Values, canonical, dumps, flat_bytes, is_array, split_by_kind


class CommitStorage(Protocol):
    """Two buffers, and the control page with their seals."""

    @property
    def page(self) -> ControlPage: ...

    @property
    def owner(self) -> bytes:
        """16 bytes in each seal that identify the owner of the commits."""

    @property
    def key(self) -> bytes:
        """The job's key for commit tags (commits.py)."""

    def renew(self) -> None:
        """Replace a stale page and both buffers by new ones that hold the newest commit.

        Raises OSError if there are no new ones.
        """

    def open(self, index: int) -> torch.Tensor:
        """Return the whole of buffer ``index`` (0 or 1) as it is: ``uint8[n]``, where n may be 0."""

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        """Return ``uint8[n]`` with n >= size_bytes. The content may be lost, so the buffer must not be sealed.

        Raises CommitStorageError when there is too little memory.
        """


class PrivateStorage:
    """Memory of this process, for a state without ``elasticrun``. Its commits end with the process."""

    def __init__(self) -> None:
        self.page = ControlPage(None)
        self.owner = secrets.token_bytes(16)
        self.key = secrets.token_bytes(32)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def renew(self) -> None:
        """Do nothing: no other process can make this page stale."""

    def open(self, index: int) -> torch.Tensor:
        return self._buffers[index]

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        # release the old memory before taking more
        self._buffers[index] = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._buffers[index] = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        return self._buffers[index]


Tensor = torch.Tensor
Described: TypeAlias = "tuple[str, str, tuple[int, ...], int, tuple[int, ...], object]"  # see layout.lay_out

RANDOM_GRANULE_BYTES = 4096
RANDOM_SLACK_BYTES = 1024  # the pickle of the random state varies by some bytes
_TENSORS_AT_ONCE = 1024  # whose features are compared; few enough for the cache of a core

# Everything that decides how the bytes of a tensor are copied, including changes made in place. One C call each.
_FEATURES: tuple[Callable[[Tensor], Any], ...] = (
    type,
    Tensor.data_ptr,
    Tensor.size,
    Tensor.is_contiguous,  # cheaper than the strides, and enough when it is true
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.is_neg,
)


class Plan:
    """Destinations of the given tensors and arrays. A plan is valid as long as ``fits`` returns True."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        arrays: dict[str, np.ndarray[Any, Any]],
        random_bytes: int,
        last: Plan | None,
        copy_stream_of: CopyStreamOf = copy_stream_of,
        sharding: Sharding = NO_SHARDING,
    ) -> None:
        described = [_describe_tensor(name, tensor) for name, tensor in tensors.items()]
        described += [_describe_array(name, array) for name, array in arrays.items()]
        layout = lay_out(described)
        is_same = last is not None and last.header.layout == layout and last.header.frame.sharding == sharding
        if last is not None and is_same and last.capacity_for(random_bytes):
            self.random_bytes: int = last.random_bytes
            self.header: Header = last.header
        else:
            self.random_bytes = random_capacity(random_bytes)
            self.header = Header(layout, self.random_bytes, sharding)
        self.layout = self.header.layout
        self._names = list(tensors)
        self._features = [list(map(feature, tensors.values())) for feature in _FEATURES]
        self._rare = self._rare_features(tensors.values())
        self._arrays = _array_features(arrays)
        self.odd: list[tuple[str, Entry]] = []
        self.queued: list[tuple[str, Entry]] = []
        self.pieces = self._make_pieces([*tensors.values(), *arrays.values()], copy_stream_of)

    def fits(
        self,
        tensors: dict[str, Tensor],
        arrays: dict[str, np.ndarray[Any, Any]],
        random_bytes: int,
        sharding: Sharding = NO_SHARDING,
    ) -> bool:
        """Return True if this plan is valid for these values as they are now. It detects any change made in place."""
        if (
            not self.capacity_for(random_bytes)
            or sharding != self.header.frame.sharding
            or list(tensors) != self._names
            or _array_features(arrays) != self._arrays
        ):
            return False
        try:
            return self._has_features(list(tensors.values())) and self._rare == self._rare_features(tensors.values())
        except RuntimeError:  # a tensor without memory, such as a sparse one: making a plan raises the exact error
            return False

    def _has_features(self, tensors: list[Tensor]) -> bool:
        """Return True if the features are those of ``tensors``. All features of some tensors are looked at before other
        tensors: so the processor still has these tensors in its cache."""
        for begin in range(0, len(tensors), _TENSORS_AT_ONCE):
            some = slice(begin, begin + _TENSORS_AT_ONCE)
            for feature, known in zip(_FEATURES, self._features, strict=True):
                if not all(map(operator.eq, map(feature, tensors[some]), known[some])):
                    return False
        return True

    def capacity_for(self, random_bytes: int) -> bool:
        """Return True if ``random_bytes`` bytes of random state fit into the reserved part."""
        return random_bytes + 8 <= self.random_bytes

    def _rare_features(self, tensors: Iterable[Tensor]) -> list[object]:
        """Return the strides of tensors with holes, and the conjugate bits of complex tensors."""
        _, _, _, contiguous, dtypes, _ = self._features
        found: list[object] = []
        if not all(contiguous):
            found += [t.stride() for t, whole in zip(tensors, contiguous, strict=True) if not whole]
        if any(dtype.is_complex for dtype in set(dtypes)):
            found += [t.is_conj() for t, dtype in zip(tensors, dtypes, strict=True) if dtype.is_complex]
        return found

    def _make_pieces(self, values: list[Array], copy_stream_of: CopyStreamOf) -> Pieces:
        """Return the pieces that native code copies, and record the rest.

        ``queued``: tensors that the copy stream of their device copies. ``odd``: tensors with holes, tensors whose
        stored bits differ from their values, and tensors on a device without a copy stream.
        """
        placed: dict[int, tuple[int, int]] = {}
        is_on_device = has_copy_stream(copy_stream_of)
        for value, entry in zip(values, self.layout.entries, strict=True):
            if not entry.size_bytes or entry.offset in placed:
                continue
            is_queued = isinstance(value, torch.Tensor) and is_on_device(value)
            address = None if is_queued else plain_address(value)
            placed[entry.offset] = (address or 0, entry.size_bytes)
            if is_queued:
                self.queued.append((entry.name, entry))
            elif address is None:
                self.odd.append((entry.name, entry))
        self.queued.sort(key=lambda pair: pair[1].offset)
        begin = self.header.frame.tensors
        self._offsets = sorted(placed)
        sizes = [placed[offset][1] for offset in self._offsets]
        places = [begin + offset for offset in self._offsets]
        # Without addresses, for the checksums of values that are in the buffer.
        self.places = Pieces([0] * len(places), sizes, places) if self.queued else None
        return Pieces([placed[offset][0] for offset in self._offsets], sizes, places)

    @functools.cached_property
    def names(self) -> list[list[str]]:
        """The names of each piece: several if they are tied."""
        found: dict[int, list[str]] = {offset: [] for offset in self._offsets}
        for entry in self.layout.entries:
            if entry.size_bytes:
                found[entry.offset].append(entry.name)
        return list(found.values())

    @functools.cached_property
    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape of each name."""
        return {entry.name: (entry.dtype, entry.shape) for entry in self.layout.entries}


def address(value: Array) -> int | None:
    """Return the CPU address of the first element; None for values on other devices or without memory."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.is_cpu and value.layout is torch.strided else None
    return _array_address(value) if value.size else None


def plain_address(value: Array) -> int | None:
    """Return the CPU address of a value's bytes in C order; None if the value is not stored like that."""
    if isinstance(value, torch.Tensor):
        plain = value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
        return value.data_ptr() if plain else None
    return _array_address(value) if value.flags.c_contiguous else None


dtype_name: Callable[[torch.dtype], str] = functools.cache(str)


def random_capacity(random_bytes: int) -> int:
    """Return the number of bytes to reserve for a random state of ``random_bytes`` bytes."""
    assert RANDOM_GRANULE_BYTES % ALIGNMENT_BYTES == 0
    return round_up(8 + random_bytes + RANDOM_SLACK_BYTES, RANDOM_GRANULE_BYTES)


def _array_address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _array_features(arrays: dict[str, np.ndarray[Any, Any]]) -> list[object]:
    return [(name, _array_address(a), a.dtype, a.shape, a.strides) for name, a in arrays.items()]


def _describe_array(name: str, array: np.ndarray[Any, Any]) -> Described:
    dtype, shape = array.dtype.str, array.shape
    strides = () if array.flags.c_contiguous else tuple(stride // max(array.itemsize, 1) for stride in array.strides)
    key = "numpy", _array_address(array), dtype, shape, array.strides
    return name, dtype, shape, array.nbytes, strides and unusual_strides(shape, strides), key


def _describe_tensor(name: str, tensor: Tensor) -> Described:
    check_dense(name, tensor)
    dtype, shape, strides = dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()
    bits = tensor.is_conj(), tensor.is_neg()
    key = (tensor.device, tensor.data_ptr(), dtype, shape, strides, bits)
    return name, dtype, shape, tensor.numel() * tensor.element_size(), unusual_strides(shape, strides), key


def check_dense(name: str, tensor: Tensor) -> None:
    # Wrapper subclasses (DTensor, quantised weights) have __tensor_flatten__ and no bytes of their own.
    if tensor.layout is not torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        kind = f"{type(tensor).__name__} with layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = f"quantised tensor of {tensor.dtype}"
    elif tensor.is_meta:
        kind = "tensor on the meta device"
    elif torch.nn.parameter.is_lazy(tensor):
        kind = "lazy parameter that has no shape yet (call the model once before the first commit)"
    else:
        return
    raise StateError(
        f"state.{name} is a {kind}. A commit holds only dense tensors that are whole on every rank: keep this value "
        f"outside the state, or capture it as dense tensors."
    )


_LOOK_INTERVAL_S = 0.0005

GRANULE_BYTES = 1 << 16  # the pickle of the objects grows by a few bytes now and then: avoid a new buffer for that
LENGTH_BYTES = 8  # length prefix of the random state, whose part of the buffer is longer


def transfer_header(frame: Frame, length: int) -> bytes:
    """Return what ``Snapshot.incoming`` needs to receive a commit of ``length`` bytes."""
    return msgspec.msgpack.encode((frame.layout, length - frame.objects, frame.sharding))


def private_in(part: bytes) -> bytes:
    """Return the random state, given its part of a buffer."""
    return part[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(part[:LENGTH_BYTES], "little")]


class Buffer:
    """One buffer and its seal. ``commit`` is None while the buffer holds no commit, or a partial one."""

    def __init__(self, index: int, storage: CommitStorage) -> None:
        self.index = index
        self._storage = storage
        self.commit: CommitId | None = None
        self.frame = Frame(Layout([], 0), 0, 0, 0)
        self.length = 0
        self.checksum = 0
        self._digest = 0
        self._header: Header | None = None  # the header whose encoding is in the memory
        self._header_checksum = 0
        self._header_tag = b""
        self._rest_tag: bytes | None = None  # tag of random state and objects; None: not computed yet
        self._places: tuple[Plan, list[torch.Tensor]] | None = None
        self._pinned_by: CopyStream | None = None
        self.memory = storage.open(index)
        self._find_commit()

    def _find_commit(self) -> None:
        """Find the commit that an earlier process left in this buffer."""
        found = self._storage.page.sealed(self.index, self._storage.owner)
        if found is None:
            return
        generation, tick, layout, self.length, self.checksum, tag = found
        commit = CommitId(generation, tick)
        try:
            self.frame, self._digest = parse_header(self.memory.numpy().data, self.memory.numel())
            if self._digest != layout or not self.frame.objects < self.length <= self.memory.numel():
                raise ValueError("the buffer does not contain the commit that was sealed")
            self._header_tag = part_tag(self._storage.key, self.memory[: self.frame.random].numpy())
            if not hmac.compare_digest(tag, self._tag(commit, self.checksum)):
                raise ValueError("another process than a worker of this job changed the buffer")
        except Exception as error:  # any damage
            logger.warning("discarded damaged commit %s (buffer %d): %s", commit, self.index, error)
            self.unseal()
            return
        self.commit = commit

    # ------------------------------------------------------------------------------------------------------- writing

    def begin(self, header: Header, private: bytes, objects_bytes: int) -> int:
        """Grow the buffer and write all parts before the tensors. Returns the header's checksum.

        The previous commit in this buffer is lost.
        """
        self._wait_for_copy()
        self.unseal()
        self.ensure_size(header.frame.objects + objects_bytes)
        self.frame = header.frame
        self._rest_tag = None
        self.length = self.frame.objects + objects_bytes
        content = self.memory.numpy()
        if self._header is not header:
            text = header.encode(self.memory.numel())
            meant = np.frombuffer(text, dtype=np.uint8)
            content[: len(text)] = meant
            self._header, self._header_checksum = header, checksum(meant, 0, len(text))
            self._digest, self._header_tag = header_digest(text), part_tag(self._storage.key, text)
        part = (len(private).to_bytes(LENGTH_BYTES, "little") + private).ljust(self.frame.tensors - self.frame.random)
        content[self.frame.random : self.frame.tensors] = np.frombuffer(part, dtype=np.uint8)
        return self._header_checksum

    def _wait_for_copy(self) -> None:
        """Wait while the agent copies this buffer for other hosts (see replicas/pusher.py)."""
        while time.monotonic_ns() < self._storage.page.pinned_until(self.index):
            time.sleep(_LOOK_INTERVAL_S)

    def places(self, plan: Plan) -> list[torch.Tensor]:
        """Return the destinations of the tensors in ``plan.queued``, in order. Computed once per plan."""
        if self._places is None or self._places[0] is not plan:
            self._places = plan, [view(self.memory, entry, self.frame.tensors) for _, entry in plan.queued]
        return self._places[1]

    def seal(self, commit: CommitId, found: int) -> None:
        """Seal the complete content as ``commit``."""
        self.write_seal(commit, found)
        self.commit, self.checksum = commit, found

    def write_seal(self, commit: CommitId, found: int) -> None:
        """Write the seal to the control page. Safe on any thread while no other thread changes this buffer."""
        tag = self._tag(commit, found)
        self._storage.page.seal(
            self.index, self._storage.owner, commit.generation, commit.tick, self._digest, self.length, found, tag
        )

    def _tag(self, commit: CommitId, found: int) -> bytes:
        """Return a tag that only processes of this job can compute, and that covers only what this process wrote."""
        key, frame = self._storage.key, self.frame
        if self._rest_tag is None:
            content = self.memory.numpy()
            random, objects = content[frame.random : frame.tensors], content[frame.objects : self.length]
            self._rest_tag = part_tag(key, random, objects)
        owner = self._storage.owner
        return commit_tag(key, owner, self.index, commit, self.length, found, self._header_tag, self._rest_tag)

    def unseal(self) -> None:
        self._storage.page.unseal(self.index)
        self.commit = None

    def ensure_size(self, size_bytes: int) -> None:
        if self.memory.numel() < size_bytes:
            self.unpin()
            self._header = self._places = None
            self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            self.memory = self._storage.grow(self.index, round_up(size_bytes, GRANULE_BYTES))

    def grow_ahead(self, size_bytes: int) -> None:
        """Grow the buffer before a commit is begun. Its previous commit is lost. Raises nothing."""
        try:
            self._wait_for_copy()
            self.unseal()
            self.ensure_size(size_bytes)
        except Exception as error:  # the commit needs the memory, and raises the error
            logger.debug("buffer %d has not grown to %d bytes ahead: %s", self.index, size_bytes, error)

    def touch(self) -> None:
        self._header = None
        self.memory.zero_()

    def pin(self, copy_stream: CopyStream) -> None:
        """Register the memory once, so that a device can copy directly to and from it."""
        if self._pinned_by is None:
            copy_stream.pin(self.memory)
            self._pinned_by = copy_stream

    def unpin(self) -> None:
        """Undo ``pin``. Call it before the memory is released."""
        if self._pinned_by is not None:
            self._pinned_by.unpin(self.memory)
            self._pinned_by = None

    # ------------------------------------------------------------------------------------------------------- reading

    def load(self, pieces: Pieces) -> bool:
        """Copy the bytes to the addresses in ``pieces``, and return True if their checksum is correct. One pass."""
        return scatter(self.memory, pieces, 0, self.length) == self.checksum

    def is_intact(self) -> bool:
        """Return True if the checksum is correct."""
        return checksum(self.memory, 0, self.length) == self.checksum

    def objects(self) -> dict[str, Any]:
        content: Any = self.memory[self.frame.objects : self.length].numpy()
        found: dict[str, Any] = pickle.loads(content)
        return found

    def private(self) -> bytes:
        return private_in(self.memory[self.frame.random : self.frame.tensors].numpy().tobytes())

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the first byte and after the last one; (0, 0) without memory."""
        begin = self.memory.data_ptr()
        return begin, begin + self.memory.numel()


@dataclass(frozen=True, slots=True)
class Targets:
    """Live tensors and arrays that a commit's bytes fit without a conversion."""

    by_name: dict[str, Array]
    addresses: dict[int, int]  # by offset: addresses that native code writes
    queued: dict[int, tuple[torch.Tensor, Entry]]  # by offset: tensors that the copy stream of their device writes

    def pieces(self, frame: Frame) -> Pieces:
        """Return the pieces that native code copies out of a buffer with this frame."""
        sizes = {entry.offset: entry.size_bytes for entry in frame.layout.entries if entry.size_bytes}
        offsets = sorted(self.addresses)
        return Pieces(
            [self.addresses[offset] for offset in offsets],
            [sizes[offset] for offset in offsets],
            [frame.tensors + offset for offset in offsets],
        )

    def copy_to_devices(self, buffer: Buffer, copy_stream_of: CopyStreamOf) -> None:
        """Copy the bytes of an intact buffer to the tensors on devices. Return after the copies."""
        by_stream: dict[CopyStream, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, entry in self.queued.values():
            copy_stream = copy_stream_of(tensor.device)
            assert copy_stream is not None, "find_targets() has asked for it"
            live, places = by_stream.setdefault(copy_stream, ([], []))
            live.append(tensor)
            places.append(view(buffer.memory, entry, buffer.frame.tensors))
        for copy_stream, (live, places) in by_stream.items():
            buffer.pin(copy_stream)
            copy_stream.copy_back(live, places)


class Incoming(NamedTuple):
    """A received commit that is not sealed yet."""

    targets: Targets  # into which it was copied
    checksum: int


def find_targets(
    layout: Layout, live: Captured, buffers: Iterable[torch.Tensor], copy_stream_of: CopyStreamOf = copy_stream_of
) -> Targets:
    """Return the live values that can be loaded: none if one has another shape or dtype than the commit's value of that
    name, as ``apply`` then has to check all values before any is written; or if they overlap each other or ``buffers``.
    """
    by_name: dict[str, Array] = {}
    addresses: dict[int, int] = {}
    queued: dict[int, tuple[torch.Tensor, Entry]] = {}
    is_on_device = has_copy_stream(copy_stream_of)
    for entry in layout.entries:
        value = live.get(entry.name)
        address: int | None
        device_tensor: torch.Tensor | None = None
        if isinstance(value, torch.Tensor):
            same = dtype_name(value.dtype) == entry.dtype and value.size() == entry.shape
            device_tensor = value if is_on_device(value) else None
            find = plain_address if device_tensor is None else _device_address
            address = find(value) if same and value.layout is torch.strided else None
        elif isinstance(value, np.ndarray):
            same = value.dtype.str == entry.dtype and value.shape == entry.shape
            address = plain_address(value) if same and value.flags.writeable else None
        else:
            continue
        if not same:
            return Targets({}, {}, {})
        if address is None or not entry.size_bytes:
            continue
        if addresses.setdefault(entry.offset, address) == address:
            by_name[entry.name] = value
            if device_tensor is not None:
                queued[entry.offset] = device_tensor, entry
    if _overlap(layout, addresses, buffers):
        return Targets({}, {}, {})
    for offset in queued:
        del addresses[offset]
    return Targets(by_name, addresses, queued)


def _overlap(layout: Layout, addresses: dict[int, int], buffers: Iterable[torch.Tensor]) -> bool:
    """Return True if two of the targets or buffers share memory."""
    sizes = {entry.offset: entry.size_bytes for entry in layout.entries if entry.size_bytes}
    ranges = [(buffer.data_ptr(), buffer.data_ptr() + buffer.numel()) for buffer in buffers if buffer.numel()]
    ranges += [(address, address + sizes[offset]) for offset, address in addresses.items()]
    ranges.sort()
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ranges))


def _device_address(tensor: torch.Tensor) -> int | None:
    """Return the address of a device tensor whose bytes are contiguous in any dimension order; otherwise None. Copies
    from and to a device are by value, so the order does not matter. Addresses of all devices of a process differ."""
    orders = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    is_dense = any(tensor.is_contiguous(memory_format=order) for order in orders)
    return tensor.data_ptr() if is_dense and not tensor.is_conj() and not tensor.is_neg() else None


class LiveValues:
    """The live values of one rank (see ``divergence.Comparable``), which must not change while this object is used.
    Tensors of a device are copied one by one."""

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
        loss = ", and with --one-copy-per-host a restore would replace them by those of one worker of each host"
        return f"Ranks have different values after {self._ticks} ticks of this world{loss if one_copy else ''}"

    def summary(self, left_out: Container[str] = ()) -> tuple[int, int, int]:
        """Return what ``Snapshot.summary`` returns for a commit, with other numbers."""
        included = {name: value for name, value in self._arrays.items() if name not in left_out}
        forms = [(name, *_form(value)) for name, value in included.items()]
        found = [self._checksum(name) for name in included]
        blob = np.frombuffer(dumps(self._objects), dtype=np.uint8)
        return number_of(forms), number_of(found), checksum(blob, 0, len(blob))

    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        """Return what ``Snapshot.details`` returns for a commit."""
        objects: dict[str, Any] = pickle.loads(dumps(self._objects))  # as a newcomer has them
        return {name: (*_form(value), self._checksum(name)) for name, value in self._arrays.items()}, objects

    def _checksum(self, name: str) -> int:
        if name not in self._checksums:
            content = _bytes(self._arrays[name])
            self._checksums[name] = checksum(content, 0, len(content))
        return self._checksums[name]


def _form(value: Array) -> tuple[str, tuple[int, ...]]:
    is_tensor = isinstance(value, torch.Tensor)
    return dtype_name(value.dtype) if is_tensor else value.dtype.str, tuple(value.shape)  # type: ignore[union-attr]


def _bytes(value: Array) -> Any:
    """Return the bytes of a value in C order, as ``uint8[n]`` on the CPU."""
    if isinstance(value, torch.Tensor):
        return flat_bytes(value.detach().cpu())
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def has_same_bytes(live: Array, stored: Array) -> bool:
    """Return True if both have the same dtype, shape and bytes. The comparison runs on the device of ``live``."""
    if _form(live) != _form(stored):
        return False
    if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor):
        return torch.equal(flat_bytes(live), flat_bytes(stored).to(live.device))
    return bool(np.array_equal(_bytes(live), _bytes(stored)))


class Snapshot:
    """Reader and writer of the commits in a commit storage. Not thread-safe: one thread writes and reads.

    A new snapshot holds the commits of the storage's owner that the storage contains, except damaged ones. While a
    commit of tensors on devices is in progress (see async_commit.py), the snapshot holds neither this commit nor the
    one whose buffer it overwrites. Every method that reads a buffer settles it first.
    """

    def __init__(self, storage: CommitStorage | None = None, copy_stream_of: CopyStreamOf = copy_stream_of) -> None:
        self._storage: CommitStorage = storage if storage is not None else PrivateStorage()
        self._copy_stream_of = copy_stream_of
        self._copy: tuple[Copy, CommitId] | None = None  # in progress, into the older buffer
        self._trusts_steps = True
        self._last_error: BaseException | None = None
        self._older, self._newer = self._open()
        self._plan: Plan | None = None
        self.checksums: tuple[CommitId, Plan, Checksums] | None = None
        """Checksums of the values of the last commit that ``begin`` has begun for a comparison of ranks."""

    def _open(self) -> list[Buffer]:
        """Return the buffers of the storage, the older commit first."""
        buffers = [Buffer(index, self._storage) for index in (0, 1)]
        return sorted(buffers, key=lambda buffer: buffer.commit or CommitId(-1, -1))

    def _prepare(self) -> None:
        """Settle the commit in progress, and replace a stale storage, before the older buffer or a seal is written."""
        self.settle()
        if self._storage.page.is_stale:
            self.close()
            self._storage.renew()
            self._older, self._newer = self._open()

    @property
    def newest(self) -> CommitId | None:
        """The id of the newest sealed commit; None: there is none."""
        return self._newer.commit

    @property
    def previous(self) -> CommitId | None:
        """The id of the commit before the newest. None also while its buffer is overwritten, or after that failed."""
        return self._older.commit

    @property
    def size_bytes(self) -> int:
        """Size of the newest commit, in bytes; 0: there is none."""
        return self._newer.length if self._newer.commit is not None else 0

    @property
    def has_attached(self) -> bool:
        """True if the newest commit has values attached to a world, of which each worker holds its own shards."""
        return self._newer.commit is not None and bool(self._newer.frame.sharding.names)

    def reserve(self, size_bytes: int) -> None:
        """Allocate and touch memory for two commits of ``size_bytes`` bytes. Commits already held do not change.

        Raises CommitStorageError when there is too little memory.
        """
        self.settle()
        for buffer in (self._newer, self._older):
            if buffer.commit is None:
                buffer.ensure_size(size_bytes)
                buffer.touch()

    # ------------------------------------------------------------------------------------------------- writing a commit

    def write(self, captured: Captured, private: bytes, commit: CommitId, is_compared: bool = False) -> None:
        """Copy ``captured`` into the older buffer and seal it as ``commit``. ``private`` is never sent to other ranks.

        Raises:
            StateError: a value cannot be pickled, or is not a dense tensor (the message names it). Both earlier commits
                stay intact then. After any later error the newest one stays intact.
            CommitStorageError: the commit storage has too little space.
        """
        self.begin(captured, private, commit, is_compared=is_compared)
        self.finish()

    def begin(
        self,
        captured: Captured,
        private: bytes,
        commit: CommitId,
        optimizer_owned: Callable[[], Container[int]] = lambda: (),
        is_cut: Callable[[], bool] = lambda: False,
        sharding: Sharding = NO_SHARDING,
        counted: Mapping[int, torch.Tensor] | None = None,
        is_compared: bool = False,
    ) -> None:
        """Begin ``write``. With tensors on a device, the copy continues in the background; the commit is not held yet.

        Args:
            optimizer_owned: returns the ids of tensors that only an optimizer's ``step`` writes; called only if needed.
            is_cut: returns True if device data may be undefined by now. A commit whose copy ends after that is
                discarded.
            sharding: of the tensors in ``captured`` that belong to attached values.
            counted: by the id of a captured tensor, the tensor whose version counts the writes to both.
            is_compared: keep the checksums of all values in ``checksums``.

        Raises what ``write`` raises.
        """
        self._prepare()
        tensors, arrays, objects = split_by_kind(captured)
        blob = dumps(objects)
        plan, buffer = self._planned(tensors, arrays, len(private), sharding), self._older
        found = buffer.begin(plan.header, private, len(blob))
        for name, entry in plan.odd:
            place = view(buffer.memory, entry, buffer.frame.tensors)
            if name in tensors:
                place.copy_(tensors[name].detach())
            else:
                np.copyto(place, arrays[name])
        buffer.memory.numpy()[buffer.frame.objects : buffer.length] = np.frombuffer(blob, dtype=np.uint8)
        start = buffer.frame.random
        each = np.zeros(len(plan.pieces), dtype=np.uint32) if is_compared else None
        self.checksums = (commit, plan, each) if each is not None else None
        if not plan.queued:
            what = buffer.memory, plan.pieces, start, buffer.length
            found = gather(*what, found) if each is None else gather_each(*what, each, found)
            self._seal_older(found, commit)
            return
        fill(buffer.memory, plan.pieces, start, buffer.length)
        items = self._items(plan, tensors, optimizer_owned() if self._trusts_steps else (), counted or {})
        seal = functools.partial(buffer.write_seal, commit)
        places = (plan.places, each) if plan.places is not None and each is not None else None
        content = Content(buffer.memory[: buffer.length], start, found, places)
        self._copy = Copy(items, content, seal, is_cut, commit_device_memory()), commit

    def grow(self, captured: Captured, private: bytes, sharding: Sharding) -> threading.Thread | None:
        """Begin to grow the older buffer for a commit of these values; its commit is lost. None: it need not grow.

        Nothing else may use the buffer before the thread has ended.
        """
        tensors, arrays, objects = split_by_kind(captured)
        plan = self._planned(tensors, arrays, len(private), sharding)
        size = plan.header.frame.objects + len(dumps(objects))
        if self._older.memory.numel() >= size or plan.queued or self._storage.page.is_stale:
            return None
        thread = threading.Thread(target=self._older.grow_ahead, args=(size,), name="elasticstate-growth")
        thread.start()
        return thread

    def _planned(self, tensors: dict[str, torch.Tensor], arrays: Any, private: int, places: Sharding) -> Plan:
        if self._plan is None or not self._plan.fits(tensors, arrays, private, places):
            self._plan = Plan(tensors, arrays, private, self._plan, self._copy_stream_of, places)
        return self._plan

    def _items(
        self,
        plan: Plan,
        tensors: dict[str, torch.Tensor],
        optimizer_owned: Container[int],
        counted: Mapping[int, torch.Tensor],
    ) -> list[Item]:
        """Return the device tensors that copy streams copy into the older buffer."""
        buffer, items = self._older, []
        for (name, entry), place in zip(plan.queued, buffer.places(plan), strict=True):
            tensor = tensors[name]
            copy_stream = self._copy_stream_of(tensor.device)
            assert copy_stream is not None, "the plan has asked for it"
            buffer.pin(copy_stream)
            is_optimizer_owned = id(tensor) in optimizer_owned and not tensor.is_inference()
            end = buffer.frame.tensors + entry.offset + entry.size_bytes
            counting = counted.get(id(tensor), tensor)
            items.append(Item(tensor, place, end, copy_stream, is_optimizer_owned, counting))
        return items

    @property
    def is_settled(self) -> bool:
        """True if no commit is in progress."""
        return self._copy is None

    def when_sealed(self, call: Callable[[], object]) -> None:
        """Call a function when the commit in progress is sealed, on any thread."""
        assert self._copy is not None, "a commit is in progress"
        self._copy[0].when_sealed(call)

    @property
    def is_copied(self) -> bool:
        """True if a commit is in progress and ``settle`` would not have to wait for it."""
        return self._copy is not None and self._copy[0].is_done

    def settle(self) -> CopyOutcome | None:
        """Wait for the commit in progress, if any. If it failed, log a warning with the reason."""
        if self._copy is None:
            return None
        copy, commit = self._copy
        outcome = copy.wait()
        self._copy = None
        if outcome is CopyOutcome.SEALED:
            self._older.commit, self._older.checksum = commit, copy.checksum
            self._newer, self._older = self._older, self._newer
        elif outcome is CopyOutcome.TORN:
            self._trusts_steps = False
            logger.warning(
                "discarded commit %s: code other than an optimizer's step() wrote a parameter or the state of an "
                "optimizer while the commit was copied. From now on, training waits until each commit is copied.",
                commit,
            )
        elif outcome is CopyOutcome.FAILED:
            logger.warning("discarded commit %s: the copy from the device failed: %s", commit, copy.error)
        self._last_error = copy.error
        return outcome

    def finish(self) -> None:
        """Call ``settle``. Raise CollectiveError if the commit's generation ended before the copy did, or the error
        with which the commit failed."""
        outcome = self.settle()
        if outcome is CopyOutcome.CUT:
            raise CollectiveError("the generation ended before its commit was copied from the device")
        if outcome is not None and outcome is not CopyOutcome.SEALED:
            raise self._last_error or StateError(
                "Code other than an optimizer's step() wrote a tensor of the commit while it was copied. Commit again."
            )

    def close(self) -> None:
        """Settle and unpin, before the memory is released."""
        self.settle()
        for buffer in (self._newer, self._older):
            buffer.unpin()

    def restamp(self, commit: CommitId) -> None:
        """Give the newest commit another id. Raises StateError if there is none."""
        self._prepare()
        if self._newer.commit is None:
            raise StateError(f"This worker holds no commit that can become {commit}. Commit first.")
        self._newer.seal(commit, self._newer.checksum)

    def forget(self) -> None:
        """Discard all commits, and keep the memory."""
        self.settle()
        for buffer in (self._newer, self._older):
            buffer.unseal()

    def drop_newest(self) -> None:
        """Discard the newest commit. The commit before it becomes the newest."""
        self.settle()
        self._newer.unseal()
        self._newer, self._older = self._older, self._newer

    def drop_previous(self) -> None:
        """Discard the commit before the newest."""
        self._older.unseal()

    # ------------------------------------------------------------------------------------------------- reading a commit

    def load_into(self, live: Captured) -> Values:
        """Return the content of the newest intact commit, after copying it into the values of ``live`` that it fits.

        One pass over the memory verifies and copies, so the content of ``live`` is undefined if this raises. Values
        that the pass cannot copy (other strides in memory) are left to the caller: see ``load_value``. A damaged
        commit is discarded with a warning. The returned values are views of the buffer: copy them, never keep them.

        Raises StateError if there is no intact commit.
        """
        self.settle()
        if self._newer.commit is None:
            raise StateError("This worker holds no commit to restore. Call commit() before restore().")
        while self._newer.commit is not None:
            buffer = self._newer
            found = self._find_targets(buffer, live)
            if buffer.load(found.pieces(buffer.frame)):
                return self._loaded(buffer, found)
            self._discard_damaged(buffer)
        raise StateError("Both commits of this worker are damaged, so none can be restored. Restart the worker.")

    def objects(self) -> dict[str, Any] | None:
        """Return the objects of the newest intact commit, which ``load_into`` is about to load; None: there is none."""
        self.settle()
        while self._newer.commit is not None and not self._newer.is_intact():
            self._discard_damaged(self._newer)
        return self._newer.objects() if self._newer.commit is not None else None

    def read_private(self, commit: CommitId) -> bytes:
        """Return the part of ``commit`` that belongs to this worker alone. Call it after ``load_into``."""
        return self.find(commit).private()

    def aliases(self, captured: Captured, others: Sequence[Buffer] = ()) -> list[str]:
        """Return the names of the captured tensors and arrays that lie in one of the buffers, or in ``others``."""
        ranges = [buffer.addresses for buffer in (self._newer, self._older, *others)]
        lowest, highest = min(begin for begin, _ in ranges), max(end for _, end in ranges)
        found = {name: address(value) for name, value in captured.items() if is_array(value)}
        near = [(name, at) for name, at in found.items() if at is not None and lowest <= at < highest]
        return [name for name, at in near if any(begin <= at < end for begin, end in ranges)]

    def difference(self, captured: Captured) -> str:
        """Return a name of ``captured`` whose value is not that of the newest commit, bit by bit; "" if all are.

        Attached values are left out.
        """
        self.settle()
        buffer = self._newer
        values = Values(buffer.memory, buffer.frame, buffer.objects(), {})
        tensors, arrays, objects = split_by_kind(captured)
        live: dict[str, Array] = {**tensors, **arrays}
        if other := (values.entries.keys() ^ live.keys()) | {name for name in objects if name not in values}:
            return min(other)
        if buffer.memory[buffer.frame.objects : buffer.length].numpy().tobytes() != dumps(objects):
            for name, value in objects.items():
                if not _is_same(value, values[name]):
                    return name
        found = self._find_targets(buffer, live)
        if not equal(buffer.memory, found.pieces(buffer.frame)):
            found = Targets({}, {}, {})  # compare one by one, for the name
        done = found.by_name.keys() - {entry.name for _, entry in found.queued.values()}
        for name in live.keys() - done:
            if not has_same_bytes(live[name], values[name]):
                return name
        return ""

    # -------------------------------------------------------------------------------------------- from worker to worker

    def outgoing(self) -> tuple[bytes, torch.Tensor]:
        """Return the newest commit for ranks that lack it, without the private part: (header, ``uint8[n]``)."""
        self.settle()
        buffer = self._newer
        return transfer_header(buffer.frame, buffer.length), buffer.memory[buffer.frame.tensors : buffer.length]

    def incoming(self, header: bytes, private: bytes) -> torch.Tensor:
        """Begin to receive a commit: return the ``uint8[n]`` of the older buffer to fill before ``load_incoming``."""
        self._prepare()
        layout, objects_bytes, sharding = msgspec.msgpack.decode(header, type=tuple[Layout, int, Sharding])
        buffer = self._older
        random_bytes = random_capacity(len(private))
        buffer.begin(Header(layout, random_bytes, sharding), private, objects_bytes)
        return buffer.memory[buffer.frame.tensors : buffer.length]

    def incoming_objects(self) -> dict[str, Any]:
        """Return the objects of the received commit."""
        return self._older.objects()

    def load_incoming(self, live: Captured) -> Incoming:
        """Copy the received commit into the values of ``live`` that it fits: one pass computes its checksum, too."""
        buffer = self._older
        found = self._find_targets(buffer, live)
        return Incoming(found, scatter(buffer.memory, found.pieces(buffer.frame), 0, buffer.length))

    def seal_incoming(self, commit: CommitId, incoming: Incoming) -> Values:
        """Seal the received commit as the only one: a worker that lacked the job's state has no other useful commit.

        Returns what ``load_into`` would return.
        """
        buffer = self._older
        self._seal_older(incoming.checksum, commit)
        self._older.unseal()
        return self._loaded(buffer, incoming.targets)

    # ------------------------------------------------------------------------------------------------------- comparison

    def verify(self) -> None:
        """Verify the newest commit. Raises StateError if there is none, or if it is damaged, after dropping it."""
        self.settle()
        commit = self._newer.commit
        if commit is None:
            raise StateError("This worker holds no commit to check. Call commit() before check().")
        if not self._newer.is_intact():
            self._discard_damaged(self._newer)
            remedy = f"Restore commit {self.newest}" if self.newest is not None else "Commit again"
            raise StateError(f"Commit {commit} is damaged: its checksum is wrong. {remedy}.")

    def summary(self, left_out: Container[str] = ()) -> tuple[int, int, int]:
        """Return three numbers that summarize the newest commit: 63 bits for the names and shapes of its tensors and
        arrays, 63 bits for their checksums, and the checksum of all objects.

        ``left_out``: names of excluded tensors and arrays.
        """
        self.settle()
        buffer, frame = self._newer, self._newer.frame
        entries = [entry for entry in frame.layout.entries if entry.name not in left_out]
        forms = [(entry.name, entry.dtype, entry.shape) for entry in entries]
        objects = checksum(buffer.memory, frame.objects, buffer.length)
        return number_of(forms), number_of(self._checksums(entries)), objects

    def details(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        """Return (dtype, shape, checksum) of each tensor and array of the newest commit, and its objects."""
        self.settle()
        entries = self._newer.frame.layout.entries
        found = self._checksums(entries)
        return {e.name: (e.dtype, e.shape, f) for e, f in zip(entries, found, strict=True)}, self._newer.objects()

    def _checksums(self, entries: Sequence[Entry]) -> list[int]:
        buffer, begin = self._newer, self._newer.frame.tensors
        return checksums(buffer.memory, [begin + e.offset for e in entries], [e.size_bytes for e in entries])

    def _find_targets(self, buffer: Buffer, live: Captured) -> Targets:
        buffers = [self._newer.memory, self._older.memory]
        return find_targets(buffer.frame.layout, live, buffers, self._copy_stream_of)

    def _loaded(self, buffer: Buffer, found: Targets) -> Values:
        """Return the content of an intact buffer, after copying to devices."""
        found.copy_to_devices(buffer, self._copy_stream_of)
        return Values(buffer.memory, buffer.frame, buffer.objects(), found.by_name)

    def _seal_older(self, found: int, commit: CommitId) -> None:
        self._older.seal(commit, found)
        self._newer, self._older = self._older, self._newer

    def _discard_damaged(self, buffer: Buffer) -> None:
        logger.warning("discarded damaged commit %s (buffer %d): its checksum is wrong", buffer.commit, buffer.index)
        self.drop_newest() if buffer is self._newer else buffer.unseal()

    def find(self, commit: CommitId) -> Buffer:
        if buffer := next((buffer for buffer in (self._newer, self._older) if buffer.commit == commit), None):
            return buffer
        raise StateError(f"commit {commit} is not held, only {self.newest} and {self.previous}")


def _is_same(live: object, stored: object) -> bool:
    """Return True if two objects are equal for sure."""
    if dumps({"": live}) == dumps({"": stored}):
        return True
    found = canonical(live)  # parts of equal objects need not be the same objects
    return found is not None and found == canonical(stored)
