"""Copy server of a host: accepts connections, and serves those that prove the job's key.

One thread accepts and authenticates. A stranger gets a nonce, and nothing else: its state here is a socket and at most
72 bytes, for a limited time. When there are too many unauthenticated connections, the oldest one is closed, so that
silent strangers cannot lock others out. Each authenticated connection has a thread.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from elasticstate._native import checksum
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError
from elasticstate.net.names import listening_socket, port_of
from elasticstate.net.trust import LocalPeers
from elasticstate.replicas import wire
from elasticstate.replicas.store import GoOn, ReplicaStore, SlotBuffers, Source
from elasticstate.replicas.wire import ANSWER_BYTES, MAGIC, Wire

MAX_UNAUTHENTICATED = 64
_BACKLOG = 256
_NO_DESCRIPTOR_PAUSE_S = 0.05


class _Stranger:
    """A connection that is not authenticated."""

    def __init__(self, connection: socket.socket, peer: str, deadline: float) -> None:
        self.socket, self.peer, self.deadline = connection, peer, deadline
        self.nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.answer = b""


class ReplicaServer:
    """The server. ``serve`` handles one authenticated connection, on a thread of its own, until the connection ends."""

    def __init__(
        self, host: str, key: bytes, timeout_s: float, serve: Callable[[Wire], None], log: Callable[[str], None]
    ) -> None:
        """Listen on a free port of ``host``. ``timeout_s``: for the authentication, and for a silent peer.

        Raises OSError.
        """
        self._key, self._timeout_s, self._serve, self._log = key, timeout_s, serve, log
        self._listener = listening_socket(host, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = f"{host}:{port_of(self._listener)}"
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._peers = LocalPeers()
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, in the order of arrival
        self._refusals = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._served: dict[Wire, threading.Thread] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="elasticstate-copy-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections, and wait for their threads."""
        with self._lock:
            self._is_closed = True
            for connection in self._served:
                wire.cut(connection.socket)
            threads = list(self._served.values())
        os.write(self._woken, b"x")
        for thread in (self._thread, *threads):
            thread.join()
        for fd in (self._wake, self._woken):
            os.close(fd)

    def _run(self) -> None:
        while not self._is_closed:
            nearest = min((stranger.deadline for stranger in self._strangers.values()), default=None)
            timeout = None if nearest is None else max(0.0, nearest - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._strangers:
                    self._receive(self._strangers[key.fd])
            now = time.monotonic()
            for stranger in [found for found in self._strangers.values() if found.deadline <= now]:
                self._refuse(stranger, "it has not authenticated in time")
        for stranger in list(self._strangers.values()):
            self._forget(stranger).close()
        self._selector.close()
        self._listener.close()
        self._peers.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the peer has gone, or no descriptor is left
            if self._strangers:
                self._refuse(next(iter(self._strangers.values())), "its descriptor is needed")
            else:
                time.sleep(_NO_DESCRIPTOR_PAUSE_S)
            return
        stranger = _Stranger(connection, f"{address[0]}:{address[1]}", time.monotonic() + self._timeout_s)
        reason = self._peers.refuse(connection)
        if reason:
            self._report(stranger, reason)
            connection.close()
            return
        while len(self._strangers) >= MAX_UNAUTHENTICATED:
            self._refuse(next(iter(self._strangers.values())), "too many others have not authenticated")
        connection.setblocking(False)
        self._strangers[connection.fileno()] = stranger
        self._selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):  # the peer has gone: a read shows it
            connection.send(MAGIC + stranger.nonce)

    def _receive(self, stranger: _Stranger) -> None:
        try:
            data = stranger.socket.recv(ANSWER_BYTES - len(stranger.answer))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.answer += data
        begin = stranger.answer[: len(MAGIC)]
        if not stranger.answer:  # an agent that probes its link to this host
            self._forget(stranger).close()
        elif not data or not MAGIC.startswith(begin):
            self._refuse(stranger, "it has closed the connection" if not data else "it speaks another protocol")
        elif len(stranger.answer) == ANSWER_BYTES:
            try:
                nonce = wire.check_answer(self._key, stranger.nonce, stranger.answer)
            except CopyError as error:
                self._refuse(stranger, str(error))
            else:
                self._admit(stranger, nonce)

    def _admit(self, stranger: _Stranger, nonce: bytes) -> None:
        connection = self._forget(stranger)
        nonces = (stranger.nonce, nonce)
        try:
            wire.set_up(connection, self._timeout_s)
            connection.sendall(wire.proof(self._key, b"server", *nonces))
            authenticated = Wire(connection, self._key, b"server", nonces)
            with self._lock:
                if self._is_closed:
                    raise ConnectionError("the server closes")
                thread = threading.Thread(
                    target=self._run_connection, args=(authenticated,), name="elasticstate-copies", daemon=True
                )
                thread.start()
                self._served[authenticated] = thread
        except (OSError, RuntimeError):  # the peer has gone; no thread can be started
            connection.close()

    def _run_connection(self, connection: Wire) -> None:
        try:
            with suppress(OSError):  # the connection has ended
                self._serve(connection)
        finally:
            with self._lock:
                del self._served[connection]
            connection.close()

    def _forget(self, stranger: _Stranger) -> socket.socket:
        del self._strangers[stranger.socket.fileno()]
        self._selector.unregister(stranger.socket)
        return stranger.socket

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        self._report(stranger, reason)
        self._forget(stranger).close()

    def _report(self, stranger: _Stranger, reason: str) -> None:
        """Log the first refusal, and then ever fewer of them, so that a flood does not fill the log."""
        self._refusals += 1
        if self._refusals & (self._refusals - 1) == 0:
            self._log(f"the copy server refused {stranger.peer}: {reason} (refusal {self._refusals})")


Notify = Callable[[SlotId, CommitId], None]
NotifyDropped = Callable[[str, SlotId, CommitId, str], None]
"""Called with the host that has no copy, the slot, the commit, and the reason."""

_LOOK_INTERVAL_S = 0.5
_TRUST_S = 10.0  # without a read; afterwards, a copy is verified again

_Content = tuple[SlotId, CommitId, bool, tuple[int, int, int]]


class Library:
    """Opens copies, and verifies each before its first bytes are used. Safe on any thread.

    Memory may be damaged at any time, also after an earlier verification. So the first reader of a new world lets a
    copy be verified again, and all readers together once.

    ``go_on`` is called again and again during a verification, which ends with CopyError when it returns False.
    """

    def __init__(
        self, buffers: SlotBuffers, store: ReplicaStore, on_dropped: NotifyDropped, on_damaged: Notify
    ) -> None:
        """``on_dropped`` is called on any thread when a kept copy was damaged, ``on_damaged`` for a buffer."""
        self.buffers, self.store = buffers, store
        self._on_dropped, self._on_damaged = on_dropped, on_damaged
        self._verifying = threading.Lock()  # one at a time: a verification uses several cores
        self._read_at: dict[_Content, float] = {}  # verified contents
        self._is_closed = False

    def close(self) -> None:
        """Interrupt verifications."""
        self._is_closed = True

    def is_open(self) -> bool:
        return not self._is_closed

    def open(self, slot: SlotId, commit: CommitId) -> Source:
        """Open a copy. Raises CopyError if this host has none. Its bytes are not verified."""
        source = self.store.open(slot, commit) or self.buffers.open(slot, commit)
        if source is None:
            raise CopyError(f"host {self.buffers.host} has no commit {commit} of slot {slot}")
        return source

    def open_new(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> Source:
        """Open a copy that was verified when it was made. One of the previous agent is verified. Raises CopyError."""
        is_taken_over = (slot, commit) in self.store.unverified()
        return self.open_verified(slot, commit, go_on) if is_taken_over else self.open(slot, commit)

    def open_verified(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> Source:
        """Open a copy whose checksum is correct. Raises CopyError."""
        while True:
            source = self.open(slot, commit)
            try:
                if self._is_trusted(source) or self._verify(source, go_on):
                    return source
            except BaseException:
                source.close()
                raise
            source.close()  # a kept copy was damaged: perhaps the buffer is not

    def _is_trusted(self, source: Source) -> bool:
        key, now = _content_of(source), time.monotonic()
        if now - self._read_at.get(key, -inf) > _TRUST_S:
            return False
        self._read_at[key] = now
        return True

    def _verify(self, source: Source, go_on: GoOn) -> bool:
        with self._turn(go_on):
            if self._is_trusted(source):
                return True
            if source.is_fixed:
                is_good = self._verify_kept(source.sealed.slot, source.sealed.commit, go_on)
            else:
                self._verify_buffer(source, go_on)
                is_good = True
            now = time.monotonic()
            self._read_at = {key: at for key, at in list(self._read_at.items()) if now - at <= _TRUST_S}
            if is_good:
                self._read_at[_content_of(source)] = now
            return is_good

    def _verify_kept(self, slot: SlotId, commit: CommitId, go_on: GoOn) -> bool:
        is_good = self.store.verify(slot, commit, go_on)
        if not is_good:
            self._on_dropped(self.buffers.host, slot, commit, "it is damaged: its checksum is wrong")
        return is_good

    def _verify_buffer(self, source: Source, go_on: GoOn) -> None:
        is_intact = source.is_intact(go_on)
        source.check_unchanged()
        if not is_intact:
            self._on_damaged(source.sealed.slot, source.sealed.commit)
            raise CopyError(f"{source.sealed} is damaged: its checksum is wrong")

    def verify_buffer(self, source: Source, go_on: GoOn) -> None:
        """Raise CopyError if a buffer is damaged, or has changed since it was opened."""
        with self._turn(go_on):
            self._verify_buffer(source, go_on)

    @contextmanager
    def _turn(self, go_on: GoOn) -> Iterator[None]:
        """Wait until no other verification runs."""
        while not self._verifying.acquire(timeout=_LOOK_INTERVAL_S):
            if not go_on():
                raise CopyError("this copy server closes")
        try:
            yield
        finally:
            self._verifying.release()

    def verify_taken_over(self) -> None:
        """Verify the kept copies of the previous agent, and drop damaged ones."""
        with suppress(CopyError):  # this library closes
            for slot, commit in self.store.unverified():
                with self._turn(self.is_open):
                    self._verify_kept(slot, commit, self.is_open)


def _content_of(source: Source) -> _Content:
    return source.sealed.slot, source.sealed.commit, source.is_fixed, source.sealed.content


_SIGN_INTERVAL_S = 0.5


@dataclass(eq=False)
class ReplicaConnection:
    """The server's end of a connection. ``serve`` runs on a thread of its own until the connection ends."""

    peer: Wire
    library: Library
    on_kept: Notify  # called when a copy has arrived
    on_received: Callable[[int], None]  # called with the bytes of each part of it
    _next_sign: float = 0.0  # when the peer needs another sign of life

    def serve(self) -> None:
        """Serve requests. Raises OSError when the connection breaks."""
        while (request := self.peer.receive_request(wait=True)) is not None:
            self._next_sign = time.monotonic() + _SIGN_INTERVAL_S
            try:
                self._carry_out(request)
            except CopyError as error:
                self.peer.send(wire.RequestRefused(str(error)))

    def _carry_out(self, request: wire.Request) -> None:
        match request:
            case wire.OpenReplica():
                with closing(self.library.open_verified(request.slot, request.commit, self._go_on)) as source:
                    header = source.header()
                    source.check_unchanged()
                    self.peer.send(wire.ReplicaOpened(source.sealed, header))
            case wire.FetchBytes():
                self._fetch(request)
            case wire.ReadRanges():
                self._read(request)
            case wire.PushReplica():
                self._receive(request)

    def _go_on(self) -> bool:
        """Let the peer wait for the reply longer than for a silent server. Return False when the server closes."""
        now = time.monotonic()
        if now >= self._next_sign:
            self._next_sign = now + _SIGN_INTERVAL_S
            self.peer.send(wire.ReplyFollows())
        return self.library.is_open()

    def _fetch(self, request: wire.FetchBytes) -> None:
        with closing(self.library.open_verified(request.slot, request.commit, self._go_on)) as source:
            source.check_ranges(request.ranges)
            if sum(length for _, length in request.ranges) > wire.MAX_FETCH_BYTES:
                raise CopyError("the request is for too many bytes")
            data = b"".join(source.read(offset, length) for offset, length in request.ranges)
            source.check_unchanged()
            self.peer.send(wire.FetchedBytes(data))

    def _read(self, request: wire.ReadRanges) -> None:
        """Send ranges. The peer compares checksums: it detects damage on the way, and bytes that a worker overwrites
        between the two passes over them.
        """
        with closing(self.library.open_verified(request.slot, request.commit, self._go_on)) as source:
            source.check_ranges(request.ranges)
            self.peer.send(wire.RangesFollow())
            found = 0
            for offset, length in request.ranges:
                for at in range(offset, offset + length, wire.PIECE_BYTES):
                    end = min(at + wire.PIECE_BYTES, offset + length)
                    found = checksum(source.memory, at, end, found)
                    self.peer.send_bytes(source.memory, at, end)
            reason = ""
            try:
                source.check_unchanged()
            except CopyError as error:
                reason = str(error)
            self.peer.send(wire.RangesEnd(found, reason))

    def _receive(self, request: wire.PushReplica) -> None:
        sealed, store = request.sealed, self.library.store
        incoming = store.begin(sealed, request.size_bytes, self._go_on)
        if incoming is None:
            self.on_kept(sealed.slot, sealed.commit)  # again: the driver may be a new one
            self.peer.send(wire.ReplicaWanted(0, is_kept=True))
            return
        with incoming.owned(partial(wire.cut, self.peer.socket), self._go_on):
            self.peer.send(wire.ReplicaWanted(incoming.offset))
            try:
                received = memoryview(bytearray(wire.PIECE_BYTES))  # stays in a cache
                while part := received[: incoming.missing_bytes]:
                    wire.fill(self.peer.socket, part)
                    self.on_received(len(part))
                    incoming.write(part)
            except CopyError as error:
                # The peer is sending: a refusal between its bytes has no meaning to it.
                raise ConnectionError(str(error)) from error
            store.finish(incoming)
        self.on_kept(sealed.slot, sealed.commit)
        self.peer.send(wire.ReplicaComplete())
