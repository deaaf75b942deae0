"""Reading of copies: the search for the newest complete one, and the bytes of its parts, verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import TypeVar

from elasticstate.durable.copies import (
    BLOCK_BYTES,
    DamagedCopyError,
    File,
    Manifest,
    Part,
    complete_copies,
    copy_names,
    crc32c,
)
from elasticstate.durable.storage import open_storage

T = TypeVar("T")
_LOOK_INTERVAL_S = 0.1
_AHEAD = 2  # chunks that are read ahead
_MOST_HEADER_BYTES = 100_000_000  # safetensors 0.6 (MAX_HEADER_SIZE) reads no longer ones


class StorageHangsError(Exception):
    """A storage makes no progress."""


class StoredCopies:
    """The copies in a storage, read by threads that the caller can give up.

    Every method raises OSError, errors of the storage's library, or StorageHangsError after ``timeout_s`` without
    progress. ``check`` is called regularly while a method waits; what it raises ends the method. ``owners``: other
    users whose copies are read, too; None: any user's. That is only for tensors: objects are pickles.
    """

    def __init__(
        self,
        place: str,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        owners: Collection[int] | None = (),
    ) -> None:
        self._timeout_s = timeout_s
        self._check = check
        self._place = place
        self._storage = self._call(lambda: open_storage(place, owners))

    def names(self) -> list[str]:
        """Return the names of all copies, complete or not, the newest first."""
        return self._call(lambda: copy_names(self._storage))

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a complete copy. Raises DamagedCopyError if the copy is not complete."""
        _, found = self._call(lambda: next(complete_copies(self._storage, [name])))
        if isinstance(found, DamagedCopyError):
            raise found
        return found

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
            with self._storage.open(name, part.tensors.name) as source:
                for index in wanted:
                    at = index * BLOCK_BYTES
                    yield index, source.read_at(part.data_at + at, min(BLOCK_BYTES, part.data_bytes - at))

        for index, block in self._in_thread(blocks):
            if crc32c(block) != part.blocks_crc32c[index]:
                raise DamagedCopyError(f"{part.tensors.name} is damaged: the checksum of block {index} is wrong")
            yield index, block

    def read(self, name: str, file: str, offset: int, size: int) -> Iterator[bytes]:
        """Yield a range of a file in chunks, fewer bytes if the file ends before."""

        def chunks() -> Iterator[bytes]:
            with self._storage.open(name, file) as source:
                for at in range(offset, offset + size, BLOCK_BYTES):
                    yield source.read_at(at, min(BLOCK_BYTES, offset + size - at))

        return self._in_thread(chunks)

    def _call(self, call: Callable[[], T]) -> T:
        def once() -> Iterator[T]:
            yield call()

        return next(self._in_thread(once))

    def _in_thread(self, values: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield the values of an iterator that a thread runs. The thread never writes into memory of the caller."""
        queue: Queue[tuple[str, T | BaseException | None]] = Queue(_AHEAD)
        is_over = threading.Event()

        def put(kind: str, value: T | BaseException | None) -> bool:
            while not is_over.is_set():
                with suppress(Full):
                    queue.put((kind, value), timeout=_LOOK_INTERVAL_S)
                    return True
            return False

        def run() -> None:
            try:
                for value in values():
                    if not put("value", value):
                        return
            except BaseException as error:
                put("error", error)
            else:
                put("end", None)

        threading.Thread(target=run, name="elasticstate-durable-read", daemon=True).start()
        try:
            waited_s = 0.0
            while True:
                self._check()
                try:
                    kind, value = queue.get(timeout=_LOOK_INTERVAL_S)
                except Empty:
                    waited_s += _LOOK_INTERVAL_S
                    if waited_s >= self._timeout_s:
                        raise StorageHangsError(
                            f"{self._place} makes no progress within --durable-timeout of {self._timeout_s:g} s"
                        ) from None
                    continue
                waited_s = 0.0
                if kind == "end":
                    return
                if kind == "error":
                    assert isinstance(value, BaseException)
                    raise value
                yield value  # type: ignore[misc]
        finally:
            is_over.set()
