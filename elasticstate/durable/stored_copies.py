"""Durable copies in a storage: their names and manifests, the removal of old ones, the reading of the newest one."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from queue import Empty, Full, Queue
from typing import Any, TypeVar

import msgspec

from elasticstate._native import checksum
from elasticstate.core.ids import CommitId
from elasticstate.durable.durable_storage import DurableStorage, open_storage
from elasticstate.private import PlantedFileError

MANIFEST = "manifest.json"
VERSION = 1
BLOCK_BYTES = 8 << 20
_MOST_DESCRIPTION_BYTES = 64 << 20  # of a manifest: enough for 40 TB
C = TypeVar("C")
_NAME = re.compile(r"commit-(\d{8})-(\d{6})-(\d{3})")


class File(msgspec.Struct, frozen=True):
    """A file of a copy."""

    name: str
    bytes: int
    crc32c: int


class Part(msgspec.Struct, frozen=True):
    """The files of one commit. Their bytes in the commit's order: head, data of the tensors, objects."""

    digest: int  # of the shards in it; 0: a replicated state
    head: File
    tensors: File
    objects: File
    data_at: int  # offset of the data in the file of the tensors, behind its header
    header_crc32c: int
    data_bytes: int
    blocks_crc32c: tuple[int, ...]  # of each ``BLOCK_BYTES`` of the data, so that ranges can be read and verified

    @property
    def files(self) -> tuple[File, File, File]:
        return self.head, self.tensors, self.objects


class Manifest(msgspec.Struct, frozen=True):
    """Description of a complete copy."""

    version: int
    job: str
    job_id: str
    commit: CommitId
    world_size: int
    saved_at: float  # Unix time
    parts: tuple[Part, ...]

    @property
    def files(self) -> list[File]:
        return [file for part in self.parts for file in part.files]

    @property
    def is_sharded(self) -> bool:
        """True if each part has only shards of the state."""
        return any(part.digest for part in self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class _Checked(msgspec.Struct, frozen=True):
    """Content of the file: the manifest, and the checksum of its text."""

    crc32c: int
    copy: msgspec.Raw


class DamagedCopyError(Exception):
    """A copy is not complete, or its bytes are not those that were written. The message says what is wrong."""


class UntrustedCopyError(DamagedCopyError):
    """Another user may have written a copy. The message says why, and what to do."""


class IncompleteCopyError(DamagedCopyError):
    """A copy was never completed, or is being removed: it has no manifest."""


def copy_name(milliseconds: int) -> str:
    """Return the name of the copy that was begun at this Unix time."""
    begun = datetime.fromtimestamp(milliseconds // 1000, timezone.utc)
    return f"commit-{begun:%Y%m%d-%H%M%S}-{milliseconds % 1000:03}"


def milliseconds_of(name: str) -> int | None:
    """Return the Unix time in the name of a copy; None for another name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        begun = datetime.strptime(match[1] + match[2], "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return int(begun.timestamp()) * 1000 + int(match[3])


def copy_names(storage: DurableStorage) -> list[str]:
    """Return the names of all copies, complete or not, the newest first."""
    return sorted((name for name in storage.folders() if milliseconds_of(name) is not None), reverse=True)


def description_of(number: int) -> str:
    """Return the name of the file that describes a part, for the host that writes the manifest."""
    return f"part-{number}.json"


def encode(content: Manifest | Part) -> bytes:
    """Return the content of a manifest, or of the description of a part."""
    text = msgspec.json.encode(content)
    return msgspec.json.encode(_Checked(crc32c(text), msgspec.Raw(text))) + b"\n"


def _decode(data: bytes, name: str, kind: type[C]) -> C:
    """Return what ``encode`` has encoded. Raises DamagedCopyError."""
    try:
        checked = msgspec.json.decode(data, type=_Checked)
        text = bytes(checked.copy)
        if crc32c(text) != checked.crc32c:
            raise DamagedCopyError(f"{name} is damaged: its checksum is wrong")
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCopyError(f"{name} is damaged: {error}") from None


def read_parts(storage: DurableStorage, folder: str, total: int) -> tuple[Part, ...]:
    """Return all parts of a copy that has no manifest yet, by their descriptions.

    Raises DamagedCopyError if one is missing or not complete, and errors of the storage.
    """
    sizes, parts = storage.sizes(folder), []
    for name in map(description_of, range(1, total + 1)):
        if name not in sizes:
            raise DamagedCopyError(f"{name} is missing")
        parts.append(_decode(_read_description(storage, folder, name, sizes), name, Part))
    _check_parts(parts, sizes)
    return tuple(parts)


def _check_parts(parts: Sequence[Part], sizes: Mapping[str, int]) -> None:
    """Raise DamagedCopyError unless all files have the sizes of their description, and that is consistent."""
    if not parts:
        raise DamagedCopyError(f"{MANIFEST} names no parts")
    for part in parts:
        for file in part.files:
            if file.name not in sizes:
                raise DamagedCopyError(f"{file.name} is missing")
            if sizes[file.name] != file.bytes:
                raise DamagedCopyError(f"{file.name} has {sizes[file.name]} bytes instead of {file.bytes}")
        blocks = -(-part.data_bytes // BLOCK_BYTES)
        if min(part.data_at, part.data_bytes) < 0 or part.data_at + part.data_bytes > part.tensors.bytes:
            raise DamagedCopyError(f"{part.tensors.name} has no {part.data_bytes} bytes from {part.data_at} on")
        if len(part.blocks_crc32c) != blocks:
            raise DamagedCopyError(f"{part.tensors.name} has {len(part.blocks_crc32c)} checksums instead of {blocks}")


def read_manifest(storage: DurableStorage, name: str) -> Manifest:
    """Return the manifest of a copy that has all its files in their full sizes. Raises DamagedCopyError, OSError."""
    try:
        sizes = storage.sizes(name)
        if MANIFEST not in sizes:
            raise IncompleteCopyError(f"it has no {MANIFEST}: it was not completed")
        manifest = _decode(_read_description(storage, name, MANIFEST, sizes), MANIFEST, Manifest)
    except PlantedFileError as error:
        raise UntrustedCopyError(str(error)) from None
    except FileNotFoundError as error:  # another process removes it at the same time
        raise IncompleteCopyError(str(error)) from None
    if manifest.version != VERSION:
        raise DamagedCopyError(f"{MANIFEST} has version {manifest.version}, but this elasticstate reads {VERSION}")
    _check_parts(manifest.parts, sizes)
    return manifest


def _read_description(storage: DurableStorage, folder: str, name: str, sizes: Mapping[str, int]) -> bytes:
    if sizes[name] > _MOST_DESCRIPTION_BYTES:
        raise DamagedCopyError(f"{name} has {sizes[name]} bytes, more than {_MOST_DESCRIPTION_BYTES}")
    with storage.open(folder, name) as read_at:
        return read_at(0, sizes[name])


def remove_incomplete(storage: DurableStorage, first: str, end: str) -> None:
    """Remove what failed attempts have left: copies without a manifest, begun after ``first`` and before ``end``."""
    for name in copy_names(storage):
        with suppress(FileNotFoundError, PlantedFileError):  # another host removes it at the same time
            if first < name < end and MANIFEST not in storage.sizes(name):
                storage.remove(name, MANIFEST)


def remove_old(storage: DurableStorage, keep: int, newest: str) -> None:
    """Remove all own copies before the ``keep`` newest complete ones, and incomplete copies before ``newest``."""
    kept = 0
    for name in [name for name in copy_names(storage) if name <= newest]:
        try:
            read_manifest(storage, name)
            is_complete = True
        except UntrustedCopyError:
            continue
        except DamagedCopyError:
            is_complete = False
        if is_complete and kept < keep:
            kept += 1
        elif kept:
            storage.remove(name, MANIFEST)


def crc32c(data: Any, before: int = 0) -> int:
    """Return the CRC-32C of an object with bytes (buffer protocol), continued from ``before``."""
    return checksum(data, 0, len(data), before)


# -------------------------------------------------------------------------------------------------------------- failure
# Failures of durable copies: their kinds, one word each, and their reasons.


ABSENT = "absent"
BUSY = "busy"
FULL = "full"
HOST = "host"
HUNG = "hung"
LIBRARY = "library"
LOST = "lost"
MEMORY = "memory"
SHARDED = "sharded"
STORAGE = "storage"
TORN = "torn"
UNCHANGED = "unchanged"
NOT_FAILED = {ABSENT, BUSY, UNCHANGED}
"""Reasons not to save a copy now that are no failures."""
MISSED = {ABSENT, BUSY, TORN}
"""Kinds of attempts that came too late for a commit, or too early for the next one. The storage may be good."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ShardedCommitError(Exception):
    """A commit is not of the kind that was ordered: that of one worker alone must not become a complete copy."""


def failure_of(error: BaseException) -> tuple[str, str]:
    """Return kind and reason of an error of a storage."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ShardedCommitError):
        return SHARDED, reason
    if isinstance(error, ImportError):
        return LIBRARY, reason
    if isinstance(error, OSError) and error.errno in _FULL:
        return FULL, reason
    return STORAGE, reason if isinstance(error, OSError) else f"{type(error).__name__}: {reason}"


T = TypeVar("T")
_LOOK_INTERVAL_S = 0.1
_AHEAD = 2  # chunks that are read ahead
_MOST_HEADER_BYTES = 100_000_000  # safetensors 0.6 (MAX_HEADER_SIZE) reads no longer ones


class StorageHangsError(Exception):
    """A storage makes no progress."""


@dataclass(eq=False)
class StoredCopies:
    """The copies in a storage, read by threads that the caller can give up.

    Every method raises OSError, errors of the storage's library, or StorageHangsError after ``timeout_s`` without
    progress. Copies of any user are only for tensors: objects are pickles.
    """

    place: str
    timeout_s: float
    check: Callable[[], None] = lambda: None  # called regularly while a method waits; what it raises ends the method
    owners: Collection[int] | None = ()  # other users whose copies are read, too; None: any user's

    def __post_init__(self) -> None:
        self._storage = self._call(lambda: open_storage(self.place, self.owners))

    def names(self) -> list[str]:
        """Return the names of all copies, complete or not, the newest first."""
        return self._call(lambda: copy_names(self._storage))

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a complete copy. Raises DamagedCopyError if the copy is not complete."""
        return self._call(lambda: read_manifest(self._storage, name))

    def file(self, name: str, file: File) -> bytes:
        """Return the content of a file. Raises DamagedCopyError if its checksum is wrong."""
        data = b"".join(self.read(name, file.name, 0, file.bytes))
        if crc32c(data) != file.crc32c:
            raise DamagedCopyError(f"{file.name} is damaged: its checksum is wrong")
        return data

    def header(self, name: str, part: Part) -> bytes:
        """Return the header of the file with the tensors. Raises DamagedCopyError if its checksum is wrong."""
        if part.data_at > _MOST_HEADER_BYTES:
            raise DamagedCopyError(f"{part.tensors.name} has a header of {part.data_at} bytes, which no library reads")
        header = b"".join(self.read(name, part.tensors.name, 0, part.data_at))
        if crc32c(header) != part.header_crc32c:
            raise DamagedCopyError(f"{part.tensors.name} is damaged: the checksum of its header is wrong")
        return header

    def data(self, name: str, part: Part) -> Iterator[bytes]:
        """Yield the data of the tensors in blocks. Raises DamagedCopyError for a block whose checksum is wrong."""
        self.header(name, part)
        return (block for _, block in self.blocks(name, part, range(len(part.blocks_crc32c))))

    def blocks(self, name: str, part: Part, wanted: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of the data of the tensors, with their numbers. Raises DamagedCopyError as ``data`` does."""

        def blocks() -> Iterator[tuple[int, bytes]]:
            with self._storage.open(name, part.tensors.name) as read_at:
                for index in wanted:
                    at = index * BLOCK_BYTES
                    yield index, read_at(part.data_at + at, min(BLOCK_BYTES, part.data_bytes - at))

        for index, block in self._in_thread(blocks):
            if crc32c(block) != part.blocks_crc32c[index]:
                raise DamagedCopyError(f"{part.tensors.name} is damaged: the checksum of block {index} is wrong")
            yield index, block

    def read(self, name: str, file: str, offset: int, size: int) -> Iterator[bytes]:
        """Yield a range of a file in chunks, fewer bytes if the file ends before."""

        def chunks() -> Iterator[bytes]:
            with self._storage.open(name, file) as read_at:
                for at in range(offset, offset + size, BLOCK_BYTES):
                    yield read_at(at, min(BLOCK_BYTES, offset + size - at))

        return self._in_thread(chunks)

    def _call(self, call: Callable[[], T]) -> T:
        def once() -> Iterator[T]:
            yield call()

        return next(self._in_thread(once))

    def _in_thread(self, values: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield the values of an iterator that a thread runs. The thread never writes into memory of the caller."""
        queue: Queue[tuple[T | None, BaseException | None]] = Queue(_AHEAD)
        is_over = threading.Event()

        def put(value: T | None, error: BaseException | None = None) -> bool:
            while not is_over.is_set():
                with suppress(Full):
                    queue.put((value, error), timeout=_LOOK_INTERVAL_S)
                    return True
            return False

        def run() -> None:
            try:
                if all(map(put, values())):
                    put(None, StopIteration())
            except BaseException as error:
                put(None, error)

        threading.Thread(target=run, name="elasticstate-durable-read", daemon=True).start()
        try:
            waited_s = 0.0
            while True:
                self.check()
                try:
                    value, error = queue.get(timeout=_LOOK_INTERVAL_S)
                except Empty:
                    waited_s += _LOOK_INTERVAL_S
                    if waited_s >= self.timeout_s:
                        raise StorageHangsError(
                            f"{self.place} makes no progress within --durable-timeout of {self.timeout_s:g} s"
                        ) from None
                    continue
                waited_s = 0.0
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield value  # type: ignore[misc]
        finally:
            is_over.set()
