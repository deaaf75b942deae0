"""Copy server of a host: accepts connections, and serves those that prove the job's key.

One thread accepts and authenticates. A stranger gets a nonce, and nothing else: its state here is a socket and at most
72 bytes, for a limited time. When there are too many unauthenticated connections, the oldest one is closed, so that
silent strangers cannot lock others out. Each authenticated connection has a thread.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elasticstate.copies import wire
from elasticstate.copies.wire import ANSWER_BYTES, MAGIC, Wire
from elasticstate.errors import CopyError
from elasticstate.net.local_peers import LocalPeers

MAX_UNAUTHENTICATED = 64
_BACKLOG = 256
_NO_DESCRIPTOR_PAUSE_S = 0.05


class _Stranger:
    """A connection that is not authenticated."""

    def __init__(self, connection: socket.socket, peer: str, deadline: float) -> None:
        self.socket, self.peer, self.deadline = connection, peer, deadline
        self.nonce = wire.new_nonce()
        self.answer = b""


class CopyServer:
    """The server. ``serve`` handles one authenticated connection, on a thread of its own, until the connection ends."""

    def __init__(
        self, host: str, key: bytes, timeout_s: float, serve: Callable[[Wire], None], log: Callable[[str], None]
    ) -> None:
        """Listen on a free port of ``host``. ``timeout_s``: for the authentication, and for a silent peer.

        Raises OSError.
        """
        self._key, self._timeout_s, self._serve, self._log = key, timeout_s, serve, log
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
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
                connection.cut()
            threads = list(self._served.values())
        os.write(self._woken, b"x")
        for thread in (self._thread, *threads):
            thread.join()
        for fd in (self._wake, self._woken):
            os.close(fd)

    # ------------------------------------------------------------------------------------------------ the one thread

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
        if not data or not MAGIC.startswith(begin):
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
