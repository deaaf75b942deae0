"""Buffer: one of the two files of a commit storage, in the format of layout.py; and the plan from tensors to it."""

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import torch

from elasticstate._native import ControlPage, Pieces, checksum, scatter
from elasticstate.commits import NO_SHARDING, Sharding, commit_tag, header_digest, part_tag
from elasticstate.core.ids import CommitId
from elasticstate.errors import StateError
from elasticstate.log import logger
from elasticstate.state.async_commit import CopyStream, CopyStreamOf, copy_stream_of, has_copy_stream
from elasticstate.state.layout import (
    ALIGNMENT_BYTES,
    Entry,
    Frame,
    Header,
    Layout,
    lay_out,
    parse,
    round_up,
    view,
)
from elasticstate.state.values import Array, Captured

# -------------------------------------------------------------------------------------------------------------- storage
# Commit storage: the memory that holds the two buffers of a snapshot.


class CommitStorage(Protocol):
    """Two buffers, and the control page with their seals."""

    @property
    def page(self) -> ControlPage: ...

    @property
    def owner(self) -> bytes:
        """16 bytes in each seal that identify the owner of the commits."""

    @property
    def key(self) -> bytes:
        """The job's key for commit tags (seals.py)."""

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
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def renew(self) -> None:
        """Do nothing: no other process can make this page stale."""

    def open(self, index: int) -> torch.Tensor:
        return self._buffers[index]

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        self._buffers[index] = torch.empty(0, dtype=torch.uint8)  # release the old memory before taking more
        self._buffers[index] = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        return self._buffers[index]


# ----------------------------------------------------------------------------------------------------------------- plan
# Plan: the mapping from live tensors to a buffer. It is checked at each commit, and rebuilt after any change.


Tensor = torch.Tensor
Described: TypeAlias = "tuple[str, str, tuple[int, ...], int, object]"  # see layout.lay_out

RANDOM_GRANULE_BYTES = 4096
RANDOM_SLACK_BYTES = 1024  # the pickle of the random state varies by some bytes

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
            return all(
                _are_equal(feature, tensors.values(), known)
                for feature, known in zip(_FEATURES, self._features, strict=True)
            ) and self._rare == self._rare_features(tensors.values())
        except RuntimeError:  # a tensor without memory, such as a sparse one: making a plan raises the exact error
            return False

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
        """Return the pieces that native code copies, and record the rest in ``queued`` and ``odd``.

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
        offsets = sorted(placed)
        return Pieces(
            [placed[offset][0] for offset in offsets],
            [placed[offset][1] for offset in offsets],
            [begin + offset for offset in offsets],
        )


def _are_equal(feature: Callable[[Tensor], Any], tensors: Iterable[Tensor], known: list[Any]) -> bool:
    """Return True if the feature of all tensors is as known. Lists are compared in half the time, but many sizes, which
    are tuples, would let the garbage collector run."""
    found = map(feature, tensors)
    return all(map(operator.eq, found, known)) if feature is Tensor.size else list(found) == known


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


def copy_odd(memory: Tensor, values: dict[str, Array], odd: Iterable[tuple[str, Entry]], begin: int) -> None:
    """Copy values that are not plain memory with torch and numpy. Return when all copies are complete."""
    for name, entry in odd:
        value, place = values[name], view(memory, entry, begin)
        if isinstance(value, torch.Tensor):
            place.copy_(value.detach())
        else:
            np.copyto(place, value)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype)


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
    return name, dtype, shape, array.nbytes, ("numpy", _array_address(array), dtype, shape, array.strides)


def _describe_tensor(name: str, tensor: Tensor) -> Described:
    check_dense(name, tensor)
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    bits = tensor.is_conj(), tensor.is_neg()
    key = (tensor.device, tensor.data_ptr(), dtype, shape, tensor.stride(), bits)
    return name, dtype, shape, tensor.numel() * tensor.element_size(), key


def check_dense(name: str, tensor: Tensor) -> None:
    # Wrapper subclasses (DTensor, quantised weights) have __tensor_flatten__ and no bytes of their own.
    if tensor.layout is not torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        kind = f"{type(tensor).__name__} with layout {tensor.layout}"
    elif tensor.is_quantized:
        kind = f"quantised tensor of {tensor.dtype}"
    elif tensor.is_meta:
        kind = "tensor on the meta device"
    elif torch.nn.parameter.is_lazy(tensor):
        kind = "lazy parameter that has no shape yet"
    else:
        return
    raise StateError(
        f"state.{name} is a {kind}. A commit holds only dense tensors that are whole on every rank: keep this value "
        f"outside the state, or capture it as dense tensors."
    )


# --------------------------------------------------------------------------------------------------------------- buffer


_LOOK_INTERVAL_S = 0.0005

GRANULE_BYTES = 1 << 16  # the pickle of the objects grows by a few bytes now and then: avoid a new buffer for that
LENGTH_BYTES = 8  # length prefix of the random state, whose part of the buffer is longer


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
            self.frame, self._digest = parse(self.memory)
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
        """Wait while the agent copies this buffer for other hosts (see replicas/pusher.py): as long as a copy in memory
        takes, and at most until the time that the agent has set."""
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
        self.record_seal(commit, found)

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

    def record_seal(self, commit: CommitId, found: int) -> None:
        """Record the seal in this object, after ``write_seal``."""
        self.commit, self.checksum = commit, found

    def unseal(self) -> None:
        self._storage.page.unseal(self.index)
        self.commit = None

    def ensure_size(self, size_bytes: int) -> None:
        if self.memory.numel() < size_bytes:
            self.unpin()
            self._header = self._places = None
            self.memory = torch.empty(0, dtype=torch.uint8)
            self.memory = self._storage.grow(self.index, round_up(size_bytes, GRANULE_BYTES))

    def grow_ahead(self, size_bytes: int) -> None:
        """Grow the buffer before a commit is begun. Its previous commit is lost."""
        self._wait_for_copy()
        self.unseal()
        self.ensure_size(size_bytes)

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
        part = self.memory[self.frame.random : self.frame.tensors].numpy().tobytes()
        length = int.from_bytes(part[:LENGTH_BYTES], "little")
        return part[LENGTH_BYTES : LENGTH_BYTES + length]

    def transfer_header(self) -> bytes:
        """Return what ``Snapshot.incoming`` needs to receive this commit."""
        frame = self.frame
        return msgspec.msgpack.encode((frame.layout, self.length - frame.objects, frame.sharding))

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the first byte and after the last one; (0, 0) without memory."""
        begin = self.memory.data_ptr()
        return begin, begin + self.memory.numel()


class Growth:
    """Growth of one buffer, which no other thread uses before ``wait`` has returned."""

    def __init__(self, buffer: Buffer, size_bytes: int) -> None:
        self._thread = threading.Thread(target=self._grow, args=(buffer, size_bytes), name="elasticstate-growth")
        self._thread.start()

    @staticmethod
    def _grow(buffer: Buffer, size_bytes: int) -> None:
        try:
            buffer.grow_ahead(size_bytes)
        except Exception as error:  # the commit needs the memory, and raises the error
            logger.debug("buffer %d has not grown to %d bytes ahead: %s", buffer.index, size_bytes, error)

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()


# -------------------------------------------------------------------------------------------------------------- loading
# Loading: a commit's bytes go straight into the live tensors and arrays that they fit.


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
    """Return the live values that can be loaded.

    The result is empty if a live value has another shape or dtype than the commit's value of that name, because
    ``apply`` then has to check all values before any is written. The result is also empty if live values overlap each
    other or ``buffers``.
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
    """Return the address of a device tensor whose bytes are contiguous in any dimension order; otherwise None.

    Copies from and to a device are by value, so the order does not matter. Addresses of all devices of a process
    differ.
    """
    is_dense = tensor.is_contiguous() or any(
        tensor.ndim == ndim and tensor.is_contiguous(memory_format=memory_format)
        for ndim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    return tensor.data_ptr() if is_dense and not tensor.is_conj() and not tensor.is_neg() else None
