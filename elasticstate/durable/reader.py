"""Reading of copies: the search for the newest complete one, and the bytes of its parts, verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import TypeVar

from elasticstate.durable.copies import DamagedCopyError, File, Manifest, Part, complete_copies, copy_names, crc32c
from elasticstate.durable.parts import CHUNK_BYTES
from elasticstate.durable.storage import open_storage

T = TypeVar("T")
_LOOK_INTERVAL_S = 0.1
_AHEAD = 2  # chunks that are read ahead


class StorageHangsError(Exception):
    """A storage makes no progress."""


class Copies:
    """The copies in a storage, read by threads that the caller can give up.

    Every method raises OSError, errors of the storage's library, or StorageHangsError after ``timeout_s`` without
    progress. ``check`` is called regularly while a method waits; what it raises ends the method.
    """

    def __init__(self, place: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        self._timeout_s = timeout_s
        self._check = check
        self._place = place
        self._storage = self._call(lambda: open_storage(place))

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
        header = b"".join(self.read(name, part.tensors.name, 0, part.data_at))
        if crc32c(header) != part.header_crc32c:
            raise DamagedCopyError(f"{part.tensors.name} is damaged: the checksum of its header is wrong")
        return header

    def data(self, name: str, part: Part) -> Iterator[bytes]:
        """Yield the data of the tensors in chunks. Raises DamagedCopyError at the end if the checksum is wrong."""
        self.header(name, part)
        found = size = 0
        for chunk in self.read(name, part.tensors.name, part.data_at, part.data_bytes):
            found, size = crc32c(chunk, found), size + len(chunk)
            yield chunk
        if (found, size) != (part.data_crc32c, part.data_bytes):
            raise DamagedCopyError(f"{part.tensors.name} is damaged: its checksum is wrong")

    def read(self, name: str, file: str, offset: int, size: int) -> Iterator[bytes]:
        """Yield a range of a file in chunks, fewer bytes if the file ends before."""

        def chunks() -> Iterator[bytes]:
            with self._storage.open(name, file) as source:
                for at in range(offset, offset + size, CHUNK_BYTES):
                    yield source.read_at(at, min(CHUNK_BYTES, offset + size - at))

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
