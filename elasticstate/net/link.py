"""The Unix socket between an agent and the workers of its host: SOCK_SEQPACKET, one datagram is one message.

The worker's end is handed over to its sentinel (native/sentinel.cpp). The agent's end lives on an asyncio loop, and
never blocks it: what a worker does not read is kept in a queue until it does, or until its heartbeat is overdue.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from elasticstate.core.types import WorkerId
from elasticstate.net import codec, messages, orders

MAX_DATAGRAM_BYTES = 128 * 1024  # well below the kernel's default for a socket's send buffer
_CUT = "\n... cut ...\n"


def encode_from_worker(message: messages.FromWorkerBody) -> bytes:
    """The message as a worker's socket carries it; a traceback that is too long for that is cut in its middle."""
    data = codec.encode(message)
    if len(data) > MAX_DATAGRAM_BYTES and isinstance(message, messages.Failure):
        half = MAX_DATAGRAM_BYTES // 10  # characters, of up to four bytes each
        error = message.error[:half] + _CUT + message.error[-half:]
        data = codec.encode(msgspec.structs.replace(message, error=error))
    return data


class WorkerLink:
    """The worker's end, until its sentinel takes it over. It blocks; ``send`` may be called from any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def connect(self) -> None:
        """Raises OSError when the agent is not there."""
        self._socket.connect(self._path)

    def detach(self) -> int:
        """The socket's descriptor, which is the caller's to close from now on."""
        return self._socket.detach()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: messages.FromWorkerBody) -> None:
        """Raises OSError when the agent is gone."""
        self._socket.send(encode_from_worker(message))

    def receive(self) -> messages.ToWorkerBody | None:
        """The next message; None when the agent is gone. Raises BlockingIOError when there is none yet."""
        try:
            data = self._socket.recv(MAX_DATAGRAM_BYTES, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            return None
        return orders.decode_to_worker(data) if data else None

    def close(self) -> None:
        self._socket.close()


class WorkerConnection:
    """The agent's end of one worker's socket. ``send`` neither blocks nor fails: a dead worker is seen elsewhere."""

    def __init__(self, server: AgentSocket, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._queue: deque[bytes] = deque()
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self.receive_pending)
        self.worker: WorkerId | None = None  # unknown until it has said Hello

    @property
    def is_open(self) -> bool:
        return self._open

    def send(self, data: bytes) -> None:
        """Send an encoded message, now or as soon as the worker reads."""
        if not self._open:
            return
        self._queue.append(data)
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            try:
                self._socket.send(self._queue[0])
            except BlockingIOError:  # noqa: PERF203
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError:
                self._queue.clear()
            else:
                self._queue.popleft()
        self._loop.remove_writer(self._socket)

    def receive_pending(self) -> None:
        """Hand on all that has arrived."""
        while self._open:
            try:
                data = self._socket.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            try:
                message = codec.decode_from_worker(data)
            except msgspec.DecodeError as error:
                self._server.refuse(self, f"sent what is no message: {error}")
                return
            self._server.receive(self, message)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._server.forget(self)


class AgentSocket:
    """The agent's listening socket.

    ``admit(worker)`` says why a worker is not accepted, or "". ``received(worker, message)`` gets each message of an
    admitted worker, its Hello first. ``complain`` gets a line on whoever was refused.
    """

    def __init__(
        self,
        path: str,
        admit: Callable[[WorkerId], str],
        received: Callable[[WorkerId, messages.FromWorkerBody], None],
        complain: Callable[[str], None],
    ) -> None:
        self.path = path
        self._admit = admit
        self._received = received
        self._complain = complain
        self._connections: set[WorkerConnection] = set()
        self._workers: dict[WorkerId, WorkerConnection] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)

    def open(self) -> None:
        """Listen. Raises OSError when the path is taken, or longer than the kernel takes (107 bytes)."""
        self._listener.bind(self.path)
        self._listener.listen(128)
        asyncio.get_running_loop().add_reader(self._listener, self.accept_pending)

    def close(self) -> None:
        """Also tells all workers that the agent is gone. May be called twice."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def is_connected(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def send(self, worker: WorkerId, data: bytes) -> None:
        """Send an encoded message; without effect on a worker that is not connected."""
        if worker in self._workers:
            self._workers[worker].send(data)

    def drain(self, worker: WorkerId) -> None:
        """Hand on all that a worker has sent before it ended."""
        self.accept_pending()
        for connection in list(self._connections):
            if connection.worker in (None, worker):
                connection.receive_pending()

    def disconnect(self, worker: WorkerId) -> None:
        if worker in self._workers:
            self._workers[worker].close()

    def accept_pending(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid():
                self._complain(f"refused process {pid}: it belongs to user {uid}")
                connection.close()
            else:
                self._connections.add(WorkerConnection(self, connection))

    # ------------------------------------------------------------------------------------ called by its connections

    def receive(self, connection: WorkerConnection, message: messages.FromWorkerBody) -> None:
        if connection.worker is None:
            reason = self._check(message)
            if reason:
                self.refuse(connection, reason)
                return
            assert isinstance(message, messages.Hello)
            connection.worker = message.worker
            self._workers[message.worker] = connection
        self._received(connection.worker, message)

    def _check(self, message: messages.FromWorkerBody) -> str:
        if not isinstance(message, messages.Hello):
            return "did not say hello first"
        if message.protocol != messages.PROTOCOL_VERSION:
            return f"speaks protocol {message.protocol}, this is {messages.PROTOCOL_VERSION}"
        if message.worker in self._workers:
            return f"says it is {message.worker}, which is connected"
        return self._admit(message.worker)

    def refuse(self, connection: WorkerConnection, reason: str) -> None:
        who = connection.worker or "a process"
        self._complain(f"{who} {reason}: disconnected")
        connection.close()

    def forget(self, connection: WorkerConnection) -> None:
        self._connections.discard(connection)
        if connection.worker is not None and self._workers.get(connection.worker) is connection:
            del self._workers[connection.worker]
