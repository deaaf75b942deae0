"""Reader of copies of commits on any host of the job, for workers and agents."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from elasticstate._native import checksum
from elasticstate.core.ids import SlotId
from elasticstate.core.types import CopyOf
from elasticstate.errors import CollectiveError, CopyError
from elasticstate.replicas import wire
from elasticstate.replicas.store import Sealed
from elasticstate.replicas.wire import Wire

KEYED_BYTES = 1 << 20
"""Up to this size, a read has a keyed checksum. It costs CPU time, so larger reads have a CRC-32C."""

_CONNECTIONS = 4  # for one large read
_SHARE_BYTES = 32 << 20  # a further connection pays for this many bytes

T = TypeVar("T")
Part = tuple[int, memoryview]  # offset in the file, and the target


class ReplicaClient:
    """Reads copies. All methods are safe on any thread; all raise CopyError, which names the copy.

    A call waits at most the time-out for the connection, and for each piece of data. Calls raise CollectiveError when
    another thread has closed the client, because the world is over.
    """

    def __init__(self, addresses: Mapping[str, str], key: bytes, timeout_s: float) -> None:
        """``addresses``: "ip:port" of the copy server of each host. ``key``: the job's (net.trust.storage_key)."""
        self._addresses = addresses
        self._key = key
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[str, list[Wire]] = {}
        self._in_use: set[socket.socket] = set()
        self.closed = threading.Event()

    def close(self) -> None:
        """Close all connections. Calls on other threads end with CollectiveError."""
        with self._lock:
            self.closed.set()
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
            for used in self._in_use:
                wire.cut(used)
        for connection in idle:
            connection.close()

    def header(self, copy: CopyOf) -> bytes:
        """Return all bytes before the random state, which a process of the job has sent unchanged."""
        return self._open(copy).header

    def sealed(self, copy: CopyOf) -> Sealed:
        """Return the seal: length and checksum of the sealed content, and its tag."""
        return self._open(copy).sealed

    def _open(self, copy: CopyOf) -> wire.ReplicaOpened:
        def open_copy(connection: Wire) -> wire.ReplicaOpened:
            connection.send(wire.OpenReplica(copy.slot, copy.commit))
            return connection.receive(wire.ReplicaOpened)

        return self._call(copy, open_copy)

    def read(self, copy: CopyOf, offset: int, length: int) -> bytes:
        """Return bytes with keyed checksums: for what is parsed or unpickled."""
        data = bytearray(length)
        self._fetch(copy, [(offset, memoryview(data))])
        return bytes(data)

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read bytes at (offset in the file) into memory. After an error, the memory has any content."""
        parts = [(offset, target.cast("B")) for offset, target in ranges if target.nbytes]
        total = sum(len(target) for _, target in parts)
        if total <= KEYED_BYTES:
            self._fetch(copy, parts)
            return
        shares = _divide(parts, min(_CONNECTIONS, 1 + total // _SHARE_BYTES), total)
        if len(shares) == 1:
            self._read(copy, shares[0])
            return
        with ThreadPoolExecutor(len(shares), thread_name_prefix="elasticstate-copies") as threads:
            for answer in [threads.submit(self._read, copy, share) for share in shares]:
                answer.result()

    def _fetch(self, copy: CopyOf, parts: list[Part]) -> None:
        pieces = _divide(parts, max(1, -(-_size(parts) // wire.MAX_FETCH_BYTES)), _size(parts)) if parts else []
        for some in (batch for piece in pieces for batch in _batches(piece)):

            def fetch(connection: Wire, some: list[Part] = some) -> None:
                connection.send(wire.FetchBytes(copy.slot, copy.commit, [(at, len(target)) for at, target in some]))
                data = memoryview(connection.receive(wire.FetchedBytes).data)
                if len(data) != _size(some):
                    raise CopyError(f"received {len(data)} bytes instead of {_size(some)}")
                for _, target in some:
                    target[:], data = data[: len(target)], data[len(target) :]

            self._call(copy, fetch)

    def _read(self, copy: CopyOf, parts: list[Part]) -> None:
        def read(connection: Wire) -> None:
            for some in _batches(parts):
                _read_batch(connection, copy, some)

        self._call(copy, read)

    def _call(self, copy: CopyOf, call: Callable[[Wire], T]) -> T:
        """Make a call on a connection to the host of the copy."""
        is_used = True
        while True:  # the server may have closed a connection that was idle: then once more on a new one
            try:
                connection, is_used = self._take(copy.host)
            except (OSError, CopyError) as error:
                self.check_open()
                raise CopyError(f"{_name(copy)} cannot be read: {_reason(error)}") from error
            try:
                result = call(connection)
            except BaseException as error:
                self._discard(connection)
                self.check_open()
                if is_used and isinstance(error, ConnectionError):
                    continue
                if isinstance(error, OSError | CopyError):
                    raise CopyError(f"{_name(copy)} cannot be read: {_reason(error)}") from error
                raise
            self._give_back(copy.host, connection)
            return result

    def check_open(self) -> None:
        """Raise CollectiveError if another thread has closed this client."""
        if self.closed.is_set():
            raise CollectiveError("the world has ended while shards were read")

    def _take(self, host: str) -> tuple[Wire, bool]:
        """Return a connection, and True if it has been used before."""
        with self._lock:
            self.check_open()
            idle = self._idle.get(host)
            if idle:
                connection = idle.pop()
                self._in_use.add(connection.socket)
                return connection, True
        address = self._addresses.get(host)
        if not address:
            raise CopyError(f"host {host} has no copy server")
        try:
            return wire.dial(address, self._key, self._timeout_s, self._use), False
        except BaseException:
            with self._lock:
                self._in_use = {used for used in self._in_use if used.fileno() >= 0}  # without the failed one
            raise

    def _use(self, connection: socket.socket) -> None:
        with self._lock:
            self.check_open()
            self._in_use.add(connection)

    def _give_back(self, host: str, connection: Wire) -> None:
        with self._lock:
            self._in_use.discard(connection.socket)
            if not self.closed.is_set():
                self._idle.setdefault(host, []).append(connection)
                return
        connection.close()

    def _discard(self, connection: Wire) -> None:
        with self._lock:
            self._in_use.discard(connection.socket)
        with suppress(OSError):
            connection.close()


def _read_batch(connection: Wire, copy: CopyOf, parts: list[Part]) -> None:
    connection.send(wire.ReadRanges(copy.slot, copy.commit, [(offset, len(target)) for offset, target in parts]))
    connection.receive(wire.RangesFollow)
    found = 0
    for _, target in parts:
        for at in range(0, len(target), wire.PIECE_BYTES):
            piece: Any = target[at : at + wire.PIECE_BYTES]
            wire.fill(connection.socket, piece)
            found = checksum(piece, 0, len(piece), found)
    end = connection.receive(wire.RangesEnd)
    if end.reason:
        raise CopyError(end.reason)
    if end.checksum != found:
        raise CopyError("the bytes were changed on their way, or by their worker")


def _size(parts: Sequence[Part]) -> int:
    return sum(len(target) for _, target in parts)


def _batches(parts: list[Part]) -> list[list[Part]]:
    return [parts[at : at + wire.MAX_RANGES] for at in range(0, len(parts), wire.MAX_RANGES)]


def _divide(parts: list[Part], shares: int, total: int) -> list[list[Part]]:
    """Divide the parts into shares of nearly the same number of bytes, in order."""
    most = -(-total // shares)
    result: list[list[Part]] = [[]]
    free = most
    for offset, target in parts:
        while len(target):
            if not free:
                result.append([])
                free = most
            piece = target[:free]
            result[-1].append((offset, piece))
            free -= len(piece)
            offset, target = offset + len(piece), target[len(piece) :]
    return result


def _name(copy: CopyOf) -> str:
    return f"the copy of commit {copy.commit} of slot {SlotId(*copy.slot)} on host {copy.host}"


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
