"""Store of the kept copies of one host: whole files of commits, which outlive workers, and the agent.

::

    <commit directory>/copies/    mode 0700, files 0600
        NUMBER.part                         a copy that is not complete, or spare; the next agent removes it
        OWNER.GENERATION.TICK.safetensors   a copy, in the format of the buffers
        OWNER.GENERATION.TICK.seal          its slot, commit, length and checksum; written last

OWNER is the hexadecimal owner of the slot's commits (commits.owner_of). A copy exists when its seal file exists.
Descriptors stay open, so copies survive the loss of their names (see agent/host_storage.py) until this agent ends.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from elasticstate._native import ControlPage, checksum, copy
from elasticstate.commits import Parts, commit_tag, grow, header_digest, owner_of, part_tag, parts_of
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError
from elasticstate.private import make_file, open_directory, open_file, read_file, write_file

GoOn = Callable[[], bool]
"""Returns False when a long operation should end, with CopyError."""
_ALLOCATE_BYTES = 64 << 20  # one step of an allocation: a store that closes waits for one step


class StoreFile:
    """A file of the store and its mapping. The lock of the store protects ``name``, ``readers`` and ``is_shared``.

    A new file costs more than its content: the kernel allocates and clears each page. So the store keeps the file of a
    copy that is not needed any more, with its mapping, for the next copy. This is no more memory than a replication
    needs in any case, because the previous copy stays until the next one is complete.
    """

    def __init__(self, name: str, fd: int) -> None:
        """Take ownership of the descriptor."""
        self.name, self.fd = name, fd
        self.readers = 0
        self.is_shared = False  # True: another process reads it, so it is not used again
        self._allocated = 0  # bytes that have blocks for sure
        self._mapped: Any = None

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Close the descriptor. The memory stays as long as a reader has it."""
        self._mapped = None
        os.close(self.fd)

    def reserve(self, length: int, size_bytes: int, go_on: GoOn) -> None:
        """Give the file this size, with all blocks of the first ``length`` bytes; the rest is never written.

        Raises OSError, or CopyError when ``go_on`` returns False.
        """
        before = self.size_bytes
        if self._allocated != length:
            os.ftruncate(self.fd, min(self._allocated, length))
            for end in range(_ALLOCATE_BYTES, length + _ALLOCATE_BYTES, _ALLOCATE_BYTES):
                if not go_on():
                    raise CopyError("this copy store closes")
                self._allocated = grow(self.fd, min(end, length))
            os.ftruncate(self.fd, size_bytes)
        elif before != size_bytes:
            os.ftruncate(self.fd, max(length, size_bytes))
        if before != size_bytes:
            self._mapped = None

    def memory(self) -> Any:
        """Return the mapped file."""
        if self._mapped is None:
            self._mapped = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return self._mapped


# --------------------------------------------------------------------------------------------------------------- sealed
# Sealed content of one commit: its identity, and the checks that need only its bytes and the job's key.
#
# A copy has the content of the buffer, so it also has the seal of the buffer (see commits.py). The tag of the seal
# proves that a process of this job has written what a reader unpickles or parses.


MAX_HEADER_BYTES = 256 << 20
_LENGTH_BYTES = 8

ReadBytes = Callable[[int, int], bytes]
"""Returns the bytes of a file at (offset, length)."""


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """The seal of a buffer: it names a commit of a slot, and covers the first ``length`` bytes of a file."""

    slot: SlotId
    commit: CommitId
    index: int  # of the buffer that was sealed
    layout: int  # digest of the header
    length: int
    checksum: int  # CRC-32C of these bytes
    tag: bytes

    def __str__(self) -> str:
        return f"commit {self.commit} of slot {self.slot}"

    @property
    def content(self) -> tuple[int, int, int]:
        """Identity of the bytes: layout, length and checksum. A new id for a commit does not change it."""
        return self.layout, self.length, self.checksum


def read_header(read: ReadBytes, length: int) -> bytes:
    """Return all bytes before the random state. Raises CopyError if the file has no header."""
    prefix = read(0, _LENGTH_BYTES)
    size = _LENGTH_BYTES + int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or size > min(length, MAX_HEADER_BYTES):
        raise CopyError(f"the file of {length} bytes has no header")
    return read(0, size)


def copied_parts(header: bytes) -> Parts:
    """Return the places of the parts that the header of a copy describes. Raises CopyError."""
    try:
        return parts_of(header)
    except ValueError as error:
        raise CopyError(str(error)) from error


def check_authentic(sealed: Sealed, owner: bytes, key: bytes, header: bytes, read: ReadBytes) -> None:
    """Raise CopyError unless a process of this job has sealed this header, this random state and these objects."""
    parts = copied_parts(header)
    if not parts.objects <= sealed.length <= parts.size_bytes:
        raise CopyError(f"{sealed}: the header states {parts.size_bytes} bytes, the seal {sealed.length}")
    random = read(parts.random, parts.tensors - parts.random)
    objects = read(parts.objects, sealed.length - parts.objects)
    tags = part_tag(key, header), part_tag(key, random, objects)
    tag = commit_tag(key, owner, sealed.index, sealed.commit, sealed.length, sealed.checksum, *tags)
    if header_digest(header) != sealed.layout or not hmac.compare_digest(tag, sealed.tag):
        raise CopyError(f"{sealed}: no process of this job has written this content")


_LOOK_INTERVAL_S = 0.5


class IncomingReplica:
    """The first ``offset`` bytes of a copy, which is not visible until it is complete and its checksum is correct.

    One thread at a time owns it: only the owner writes to its memory.
    """

    def __init__(self, sealed: Sealed, size_bytes: int, file: StoreFile) -> None:
        self.sealed, self.size_bytes, self.file = sealed, size_bytes, file
        self.offset = 0
        self.is_abandoned = False
        self._found = 0  # CRC-32C of the bytes
        self._changed = threading.Condition()
        self._is_owned = False
        self._interrupt: Callable[[], None] = lambda: None

    @contextmanager
    def owned(self, interrupt: Callable[[], None], go_on: GoOn) -> Iterator[None]:
        """Own this copy. A previous owner is interrupted, because its peer has probably lost the connection.

        ``interrupt`` ends the calls in which this owner waits. Raises CopyError if the copy is abandoned.
        """
        with self._changed:
            while self._is_owned:
                self._interrupt()
                if not self._changed.wait(_LOOK_INTERVAL_S) and not go_on():
                    raise CopyError("this copy store closes")
            self.check_wanted()
            self._is_owned, self._interrupt = True, interrupt
        try:
            yield
        finally:
            with self._changed:
                self._is_owned = False
                if self.is_abandoned:
                    self.file.close()
                self._changed.notify()

    def abandon(self) -> None:
        """Close the file, or let the owner end soon with CopyError and close it. Call it once."""
        with self._changed:
            self.is_abandoned = True
            if self._is_owned:
                self._interrupt()
            else:
                self.file.close()

    def check_wanted(self) -> None:
        if self.is_abandoned:
            raise CopyError(f"{self.sealed} is not wanted any more")

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that are not there."""
        return self.sealed.length - self.offset

    def write(self, data: Any) -> None:
        """Write the next bytes, and compute their checksum in the same pass.

        Raises CopyError if the copy is abandoned.
        """
        self.check_wanted()
        end = self.offset + len(data)
        target: Any = memoryview(self.file.memory())[self.offset : end]
        self._found = copy(target, data, self._found)
        self.offset = end

    def restart(self) -> None:
        """Drop the bytes."""
        self.offset = self._found = 0

    def is_good(self) -> bool:
        """Return True if all bytes are there, and their checksum is that of the seal."""
        return self.offset == self.sealed.length and self._found == self.sealed.checksum


VERIFY_BYTES = 64 << 20  # one step of a verification: a server that closes waits for one step


class SealedSlot(Protocol):
    """The files of a slot (agent.host_storage.SlotFiles)."""

    @property
    def page(self) -> ControlPage:
        """The control page, which has the seals."""

    def duplicate(self, index: int) -> int:
        """Return a new descriptor of a buffer. Safe on any thread. Raises OSError when the files are closed."""


@dataclass(eq=False)
class Source:
    """A copy that is open for reading, mapped. ``close`` it: a copy that is open keeps its memory."""

    sealed: Sealed
    memory: Any
    release: Callable[[], None] = lambda: None
    is_unchanged: Callable[[], bool] | None = None  # returns False once the bytes may change; None: they never change

    @property
    def is_fixed(self) -> bool:
        return self.is_unchanged is None

    def close(self) -> None:
        self.memory = None
        self.release()

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.memory[offset : offset + length])

    def part(self, offset: int, most_bytes: int) -> memoryview:
        """Return the memory of the next sealed bytes from this offset on. A worker may write to it."""
        return memoryview(self.memory)[offset : min(offset + most_bytes, self.sealed.length)]

    def header(self) -> bytes:
        return read_header(self.read, self.sealed.length)

    def check_ranges(self, ranges: list[tuple[int, int]]) -> None:
        """Raise CopyError for a range that is not within the sealed bytes."""
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self.sealed.length:
                raise CopyError(f"{self.sealed} has {self.sealed.length} bytes, not {length} at {offset}")

    def check_unchanged(self) -> None:
        """Raise CopyError if the bytes may have changed since the copy was opened."""
        if self.is_unchanged is not None and not self.is_unchanged():
            raise CopyError(f"{self.sealed} is gone: its worker has written another commit to this buffer")

    def is_intact(self, go_on: GoOn) -> bool:
        """Return True if the checksum of the seal is correct. Raises CopyError when ``go_on`` returns False."""
        found = 0
        for at in range(0, self.sealed.length, VERIFY_BYTES):
            if not go_on():
                raise CopyError("this copy server closes")
            found = checksum(self.memory, at, min(at + VERIFY_BYTES, self.sealed.length), found)
        return found == self.sealed.checksum


class SlotBuffers:
    """The sealed buffers of this host's slots. Safe on any thread."""

    def __init__(self, job_id: str, host: str, slots: Mapping[int, SealedSlot]) -> None:
        self._job_id, self.host = job_id, host
        self._slots = slots
        self._lock = threading.Lock()
        # Of each buffer: device, inode and length of its file, and the mapping. A new one would cause page faults.
        self._mapped: dict[tuple[int, int], tuple[tuple[int, int, int], Any]] = {}

    def newest(self, slot: SlotId) -> CommitId | None:
        """Return the newest commit in the buffers of a slot of this host; None if there is none."""
        return max((sealed.commit for _, sealed in self._seals(slot)), default=None)

    def pin(self, slot: SlotId, commit: CommitId, until_ns: Callable[[int], int]) -> bool:
        """Let the worker not overwrite this commit until ``until_ns(its length)``. Return False if it is not sealed."""
        for files, sealed in self._seals(slot):
            if sealed.commit == commit:
                files.page.pin(sealed.index, until_ns(sealed.length))
                return True
        return False

    def unpin(self, slot: SlotId) -> None:
        if (files := self._slots.get(slot.slot)) is not None:
            for index in (0, 1):
                files.page.pin(index, 0)

    def open(self, slot: SlotId, commit: CommitId) -> Source | None:
        """Open the buffer that holds this commit; None if there is none."""
        for files, sealed in self._seals(slot) if slot.host == self.host else ():
            if sealed.commit == commit:
                with suppress(OSError, ValueError):  # the slot has got other files
                    return self._source(files, sealed)
        return None

    def _seals(self, slot: SlotId) -> list[tuple[SealedSlot, Sealed]]:
        """Return the files of a slot with each of its seals."""
        files = self._slots.get(slot.slot)
        found = [self._sealed(files, slot, index) for index in (0, 1)] if files is not None else []
        return [(files, sealed) for sealed in found if files is not None and sealed is not None]

    def _source(self, files: SealedSlot, sealed: Sealed) -> Source:
        def is_unchanged() -> bool:
            now = self._sealed(files, sealed.slot, sealed.index)
            return now is not None and now.content == sealed.content

        fd = files.duplicate(sealed.index)
        try:
            return Source(sealed, self._map(fd, sealed), is_unchanged=is_unchanged)
        finally:
            os.close(fd)

    def _map(self, fd: int, sealed: Sealed) -> Any:
        """Return the mapped buffer. No process shortens it, so SIGBUS cannot occur. Raises OSError or ValueError."""
        key, found = (sealed.slot.slot, sealed.index), os.fstat(fd)
        file = found.st_dev, found.st_ino, found.st_size
        if found.st_size < sealed.length:
            raise ValueError(f"the buffer has {found.st_size} bytes, its seal covers {sealed.length}")
        with self._lock:
            mapped = self._mapped.get(key)
            if mapped is None or mapped[0] != file:
                memory = mmap.mmap(fd, found.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
                mapped = self._mapped[key] = file, memory
            return mapped[1]

    def _sealed(self, files: SealedSlot, slot: SlotId, index: int) -> Sealed | None:
        found = files.page.sealed(index, owner_of(self._job_id, self.host, slot.slot))
        if found is None:
            return None
        generation, tick, layout, length, crc, tag = found
        return Sealed(slot, CommitId(generation, tick), index, layout, length, crc, tag)


DIRECTORY = "copies"
_PART, _DATA, _SEAL = ".part", ".safetensors", ".seal"
_MAC_BYTES = 16

Key = tuple[SlotId, CommitId]


class _SealFile(msgspec.Struct, frozen=True):
    """Content of a seal file, after a keyed checksum of it."""

    sealed: Sealed
    size_bytes: int


class _Replica:
    def __init__(self, sealed: Sealed, file: StoreFile, is_verified: bool) -> None:
        self.sealed, self.file, self.is_verified = sealed, file, is_verified


class ReplicaStore:
    """The kept copies of one host. All methods are safe on any thread, and may block for a file system in memory."""

    def __init__(self, directory: int, job_id: str, key: bytes) -> None:
        """Take over the copies of the previous agent. ``directory``: a descriptor. Raises OSError."""
        self._job_id, self._key = job_id, key
        self._lock = threading.RLock()
        self._kept: dict[Key, _Replica] = {}
        self._incoming: dict[SlotId, IncomingReplica] = {}
        self._spare: list[StoreFile] = []
        self._forgotten = CommitId(-1, 0)  # copies of older commits are not wanted
        self._number = 0  # of files, for their names
        self._is_closed = False
        self._parent = os.dup(directory)
        self._directory = _open_directory(directory)
        self._take_over()

    def move_to(self, directory: int) -> None:
        """Make new files in another commit directory, because the present one has lost its name. Raises OSError."""
        with self._lock:
            fd = _open_directory(directory)
            os.close(self._directory)
            os.close(self._parent)
            self._directory, self._parent = fd, os.dup(directory)
            self.release_spare()

    def close(self) -> None:
        """Close all files. The next agent of this host takes over the copies. No other thread uses the store."""
        with self._lock:
            self._is_closed = True
            for slot in list(self._incoming):
                self._abandon(slot)
            self.release_spare()
            for kept in self._kept.values():
                kept.file.close()
            self._kept.clear()
            os.close(self._directory)
            os.close(self._parent)

    # ---------------------------------------------------------------------------------------------------- takeover

    def _take_over(self) -> None:
        names = set(os.listdir(self._directory))
        for name in sorted(names):
            if name.endswith(_SEAL):
                with suppress(OSError, ValueError, msgspec.MsgspecError):
                    self._take_over_copy(name.removesuffix(_SEAL))
        stems = {self._stem(kept.sealed) for kept in self._kept.values()}
        for name in names - {f"{stem}{suffix}" for stem in stems for suffix in (_SEAL, _DATA)}:
            self._unlink(name)

    def _take_over_copy(self, stem: str) -> None:
        """Take over one copy. Its bytes are verified later. Raises OSError, ValueError or MsgspecError."""
        data = read_file(self._directory, f"{stem}{_SEAL}")
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise ValueError("this job has not written the seal file")
        found = msgspec.msgpack.decode(body, type=_SealFile)
        if self._stem(found.sealed) != stem:
            raise ValueError("the seal file belongs to another copy")
        file = StoreFile(f"{stem}{_DATA}", open_file(self._directory, f"{stem}{_DATA}", os.O_RDWR))
        file.is_shared = True  # perhaps: a worker of this host may have it from the previous agent
        if file.size_bytes != found.size_bytes:
            file.close()
            raise ValueError("the content has another size")
        self._kept[found.sealed.slot, found.sealed.commit] = _Replica(found.sealed, file, False)

    def unverified(self) -> list[Key]:
        """Return the copies of the previous agent whose bytes have not been verified."""
        with self._lock:
            return [key for key, kept in self._kept.items() if not kept.is_verified]

    def verify(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> bool:
        """Verify a copy once. Return False if it is damaged; then it is dropped.

        Raises CopyError when ``go_on`` has returned False.
        """
        source = self.open(slot, commit)
        if source is None:
            return True
        with closing(source):
            is_good = source.is_intact(go_on) and self._is_authentic(source.sealed, source.read)
            with self._lock:
                kept = self._kept.get((slot, commit))
                if kept is not None and kept.sealed is source.sealed:
                    kept.is_verified = True
                    if not is_good:
                        self._drop(slot, commit, recycles=False)
        return is_good

    def _is_authentic(self, sealed: Sealed, read: ReadBytes) -> bool:
        try:
            check_authentic(sealed, self._owner(sealed.slot), self._key, read_header(read, sealed.length), read)
        except CopyError:
            return False
        return True

    # ----------------------------------------------------------------------------------------------------- reading

    def kept(self) -> list[Key]:
        with self._lock:
            return sorted(self._kept)

    def size_bytes(self) -> int:
        """Return the memory of all files: of kept and of incomplete copies, and of those for the next copies."""
        with self._lock:
            kept = [copy.file for copy in self._kept.values()]
            incoming = [copy.file for copy in self._incoming.values()]
            return sum(file.size_bytes for file in (*kept, *incoming, *self._spare))

    def open(self, slot: SlotId, commit: CommitId) -> Source | None:
        """Open a copy; None if this host does not keep it. ``verify`` it before its bytes are used."""
        with self._lock:
            kept = self._kept.get((slot, commit))
            if kept is None:
                return None
            memory = kept.file.memory()
            kept.file.readers += 1
            return Source(kept.sealed, memory, partial(self._end_reading, kept.file))

    def share(self, slot: SlotId, commit: CommitId) -> tuple[int, tuple[int, int, int]] | None:
        """Return a descriptor of a copy, for a process that reads it, and ``Sealed.content``. Close the descriptor.

        None: this host does not keep the copy, or has not verified it. The bytes of this file never change afterwards:
        a later copy gets another file. Raises OSError.
        """
        with self._lock:
            kept = self._kept.get((slot, commit))
            if kept is None or not kept.is_verified:
                return None
            kept.file.is_shared = True
            return os.open(f"/proc/self/fd/{kept.file.fd}", os.O_RDONLY | os.O_CLOEXEC), kept.sealed.content

    def _end_reading(self, file: StoreFile) -> None:
        with self._lock:
            file.readers -= 1

    # ----------------------------------------------------------------------------------------------------- writing

    def begin(self, sealed: Sealed, size_bytes: int, go_on: GoOn = lambda: True) -> IncomingReplica | None:
        """Reserve the space of a copy, or continue an incomplete one. Return None if it is kept already.

        Raises CopyError if it is not wanted, or does not fit.
        """
        with self._lock:
            self._check_wanted(sealed)
            kept = self._kept.get((sealed.slot, sealed.commit))
            if kept is not None and kept.sealed.content == sealed.content:
                return None
            incoming = self._incoming.get(sealed.slot)
            if incoming is not None and (incoming.sealed, incoming.size_bytes) == (sealed, size_bytes):
                return incoming
            self._abandon(sealed.slot)
            if not 0 < sealed.length <= size_bytes:
                raise CopyError(f"{sealed} cannot be kept: it has {sealed.length} of {size_bytes} bytes")
            try:
                file = self._take_spare(sealed.length) or self._make_file()
            except OSError as error:
                raise CopyError(self._refusal(sealed, error)) from error
            incoming = self._incoming[sealed.slot] = IncomingReplica(sealed, size_bytes, file)
        with incoming.owned(lambda: None, go_on):
            try:
                self._reserve(incoming, go_on)
            except (OSError, CopyError) as error:
                self.abandon(incoming)
                raise CopyError(self._refusal(sealed, error)) from error
        return incoming

    def _reserve(self, incoming: IncomingReplica, go_on: GoOn) -> None:
        """Allocate the file. Raises OSError or CopyError."""
        length = incoming.sealed.length
        try:
            incoming.file.reserve(length, incoming.size_bytes, go_on)
        except OSError:
            if not self.release_spare():
                raise
            incoming.file.reserve(length, incoming.size_bytes, go_on)

    def _take_spare(self, length: int) -> StoreFile | None:
        """Return the spare file that is nearest in size."""
        nearest = min(self._spare, key=lambda file: abs(file.size_bytes - length), default=None)
        if nearest is not None:
            self._spare.remove(nearest)
        return nearest

    def _make_file(self) -> StoreFile:
        if not os.fstat(self._directory).st_nlink:  # deleted, and the commit directory was not
            fd = _open_directory(self._parent)
            os.close(self._directory)
            self._directory = fd
        name = self._new_name()
        return StoreFile(name, make_file(self._directory, name))

    def _new_name(self) -> str:
        self._number += 1
        return f"{self._number}{_PART}"

    def finish(self, incoming: IncomingReplica) -> None:
        """Verify a complete copy, and make it visible. The caller owns it.

        Raises CopyError; if the checksum is wrong, the copy has no bytes again.
        """
        sealed = incoming.sealed
        if not incoming.is_good() or not self._is_authentic(sealed, Source(sealed, incoming.file.memory()).read):
            incoming.restart()
            raise CopyError(f"{sealed}: the checksum is wrong")
        with self._lock:
            self._check_wanted(sealed)
            incoming.check_wanted()
            self._drop(sealed.slot, sealed.commit)  # the same commit with another content
            try:
                self._publish(sealed, incoming.file)
            except OSError as error:
                self._abandon(sealed.slot)
                raise CopyError(self._refusal(sealed, error)) from error
            self._kept[sealed.slot, sealed.commit] = _Replica(sealed, incoming.file, True)
            del self._incoming[sealed.slot]

    def _publish(self, sealed: Sealed, file: StoreFile) -> None:
        """Give the files of a copy their names: a crash leaves no copy, or the whole copy. Raises OSError."""
        stem = self._stem(sealed)
        self._rename(file, f"{stem}{_DATA}")
        body = msgspec.msgpack.encode(_SealFile(sealed, file.size_bytes))
        write_file(self._directory, f"{stem}{_SEAL}", self._mac(body) + body)

    def _rename(self, file: StoreFile, name: str) -> None:
        os.replace(file.name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        file.name = name

    # ---------------------------------------------------------------------------------------------------- removing

    def abandon(self, incoming: IncomingReplica) -> None:
        """Remove an incomplete copy."""
        with self._lock:
            if self._incoming.get(incoming.sealed.slot) is incoming:
                self._abandon(incoming.sealed.slot)

    def forget(self, before: CommitId, besides: CommitId | None = None) -> None:
        """Remove all copies of older commits except ``besides``, and refuse older ones from now on."""
        with self._lock:
            self._forgotten = max(self._forgotten, before)
            for slot in [slot for slot, found in self._incoming.items() if found.sealed.commit < before]:
                self._abandon(slot)
            for slot, commit in sorted(self._kept):
                if commit < before and commit != besides:
                    self._drop(slot, commit)

    def release_spare(self) -> bool:
        """Free the memory of spare files. Return False if there was none."""
        with self._lock:
            had_spare = bool(self._spare)
            for file in self._spare:
                self._remove(file)
            self._spare.clear()
            return had_spare

    def _drop(self, slot: SlotId, commit: CommitId, recycles: bool = True) -> None:
        kept = self._kept.pop((slot, commit), None)
        if kept is None:
            return
        self._unlink(f"{self._stem(kept.sealed)}{_SEAL}")  # first: a file without a seal is no copy
        is_read = kept.file.readers or kept.file.is_shared
        if recycles and not is_read and len(self._spare) < len(self._kept):
            with suppress(OSError):  # the directory has lost its name
                self._rename(kept.file, self._new_name())
                self._spare.append(kept.file)
                return
        self._remove(kept.file)

    def _abandon(self, slot: SlotId) -> None:
        incoming = self._incoming.pop(slot, None)
        if incoming is not None:
            self._unlink(incoming.file.name)
            incoming.abandon()

    def _remove(self, file: StoreFile) -> None:
        self._unlink(file.name)
        file.close()

    def _check_wanted(self, sealed: Sealed) -> None:
        if self._is_closed:
            raise CopyError("this copy store is closed")
        if sealed.commit < self._forgotten:
            raise CopyError(f"{sealed} is not wanted: the job keeps no copies of commits older than {self._forgotten}")

    def _refusal(self, sealed: Sealed, error: Exception) -> str:
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
            return f"{sealed} cannot be kept: {error}"
        return f"{sealed} cannot be kept: its {sealed.length} bytes do not fit into the commit directory of this host"

    def _unlink(self, name: str) -> None:
        with suppress(OSError):  # the directory has lost its name
            os.unlink(name, dir_fd=self._directory)

    def _owner(self, slot: SlotId) -> bytes:
        return owner_of(self._job_id, slot.host, slot.slot)

    def _stem(self, sealed: Sealed) -> str:
        return f"{self._owner(sealed.slot).hex()}.{sealed.commit.generation}.{sealed.commit.tick}"

    def _mac(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=self._key, person=b"kept copy").digest()


def _open_directory(parent: int) -> int:
    """Return a descriptor of the subdirectory for copies. Create it if it does not exist. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(DIRECTORY, 0o700, dir_fd=parent)
        os.chmod(DIRECTORY, 0o700, dir_fd=parent)  # the umask may have taken the owner's access away
    return open_directory(DIRECTORY, parent)
