"""The Unix socket between an agent and the workers of its host: SOCK_SEQPACKET, one datagram is one message.

The worker's end is handed over to its sentinel (native/sentinel.cpp). The agent's end belongs to an asyncio loop and
never blocks it: messages that a worker does not read stay in a queue, at most until its heartbeat times out.

A second connection of the worker is for its storage only: on it the agent passes descriptors (unix(7)). The worker
keeps this connection, because the path of the socket may be deleted. Both ends verify that the other has the same user.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from elasticstate.core.types import CommitId, SlotId, WorkerId
from elasticstate.net import codec, messages, worker_codec

MAX_DATAGRAM_BYTES = 128 * 1024  # well below the kernel's default for a socket's send buffer
_CUT = "\n... cut ...\n"
_MOST_DESCRIPTORS = 5


def encode_from_worker(message: messages.FromWorkerBody) -> bytes:
    """Encode a message for the worker's socket. A traceback that is too long is cut in its middle."""
    data = codec.encode(message)
    if len(data) > MAX_DATAGRAM_BYTES and isinstance(message, messages.GenerationFailure):
        half = MAX_DATAGRAM_BYTES // 10  # characters, of up to four bytes each
        error = message.error[:half] + _CUT + message.error[-half:]
        data = codec.encode(msgspec.structs.replace(message, error=error))
    return data


class WorkerLink:
    """The worker's end, until its sentinel takes it over. It blocks. ``send`` may be called from any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def connect(self) -> None:
        """Connect. Raises OSError when there is no agent; PermissionError when the socket belongs to another user."""
        self._socket.connect(self._path)
        _, uid = _peer_of(self._socket)
        if uid != os.getuid():
            self._socket.close()
            raise PermissionError(f"the socket {self._path} belongs to user {uid}, not to this user's agent")

    def detach(self) -> int:
        """Return the socket's descriptor. From now on the caller must close it."""
        return self._socket.detach()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: messages.FromWorkerBody) -> None:
        """Send a message. Raises OSError when the agent is gone."""
        self._socket.send(encode_from_worker(message))

    def receive(self) -> messages.ToWorkerBody | None:
        """Return the next message; None when the agent is gone. Raises BlockingIOError when none has arrived."""
        try:
            data = self._socket.recv(MAX_DATAGRAM_BYTES, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            return None
        return worker_codec.decode_to_worker(data) if data else None

    def close(self) -> None:
        self._socket.close()


def report_use_of_run(path: str, worker: WorkerId) -> None:
    """Report to the agent that the script uses ``run``. Raises what ``WorkerLink`` raises."""
    link = WorkerLink(path)
    link.connect()
    link.send(messages.RunUsed(worker, messages.PROTOCOL_VERSION))
    link.close()


class Given(NamedTuple):
    """Descriptors and key for a worker's storage. The worker must close the descriptors."""

    key: bytes
    page: int
    buffers: tuple[int, int]
    result: int
    call: int | None


class StorageLink:
    """The worker's connection for its storage. It blocks; use it from one thread."""

    def __init__(self, path: str, worker: WorkerId) -> None:
        """Connect. Raises OSError when there is no agent; PermissionError when the socket belongs to another user."""
        self._link = WorkerLink(path)
        self._worker = worker
        self._link.connect()

    def ask(self) -> Given:
        """Get the files of the worker's slot. Raises ConnectionError when the agent is gone, or gives none."""
        self._link.send(messages.RequestStorage(self._worker, messages.PROTOCOL_VERSION))
        answer, descriptors = self._receive()
        if answer is None or len(descriptors) != 4 + answer.has_call:
            _close(descriptors)
            raise ConnectionError(
                f"{self._worker} received no commit storage. The output of its agent names the cause."
            )
        page, first, second, result, *call = descriptors
        return Given(answer.key, page, (first, second), result, call[0] if call else None)

    def ask_for_peer(self, slot: int) -> tuple[int, tuple[int, int, int]] | None:
        """Get the number of another slot of this host, and its page and buffers, which the caller must close.

        ``slot``: -1 for the one with the newest commit. None: no living worker is in the slot. Raises ConnectionError
        when the agent is gone.
        """
        self._link.send(messages.RequestStorage(self._worker, messages.PROTOCOL_VERSION, slot))
        answer, descriptors = self._receive()
        if answer is None or len(descriptors) not in (0, 3):
            _close(descriptors)
            raise ConnectionError(f"{self._worker} received no answer about the commits of slot {slot}.")
        if not descriptors:
            return None
        page, first, second = descriptors
        return answer.slot, (page, first, second)

    def ask_for_copy(self, slot: SlotId, commit: CommitId) -> tuple[int, tuple[int, int, int]] | None:
        """Get the file of a copy that this host keeps, and the identity of its bytes, which never change.

        The caller must close it. None: this host keeps no such copy. Raises ConnectionError when the agent is gone.
        """
        self._link.send(messages.RequestStorage(self._worker, messages.PROTOCOL_VERSION, copy=(slot, commit)))
        answer, descriptors = self._receive()
        if answer is None or len(descriptors) != (answer.content is not None):
            _close(descriptors)
            raise ConnectionError(f"{self._worker} received no answer about the copy of commit {commit} of {slot}.")
        return None if answer.content is None else (descriptors[0], answer.content)

    def _receive(self) -> tuple[messages.Storage | None, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(
            self._link._socket, MAX_DATAGRAM_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        answer = worker_codec.decode_to_worker(data) if data else None
        return answer if isinstance(answer, messages.Storage) else None, descriptors

    def close(self) -> None:
        self._link.close()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class WorkerConnection:
    """The agent's end of a worker's socket. ``send`` neither blocks nor fails: a death is detected elsewhere."""

    def __init__(self, server: AgentSocket, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._queue: deque[bytes] = deque()
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self.receive_pending)
        self.worker: WorkerId | None = None  # unknown until its Hello

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

    def give(self, message: messages.Storage, descriptors: list[int]) -> None:
        """Send a message with descriptors, to a worker that waits for nothing else on this connection."""
        if self._open:
            with suppress(OSError):  # a worker's death is detected elsewhere
                socket.send_fds(self._socket, [worker_codec.encode_to_worker(message)], descriptors)

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
        """Pass on all messages that have arrived."""
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
                self._server.refuse(self, f"its message is malformed ({error})")
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

    ``admit(worker)`` returns why a worker is refused, or "". ``received(worker, message)`` gets each message of an
    admitted worker, its Hello first. ``storage(request, connection)`` gets each RequestStorage of an admitted worker,
    and answers by ``connection.give``. ``complain`` gets a line on each refusal.
    """

    def __init__(
        self,
        path: str,
        admit: Callable[[WorkerId], str],
        received: Callable[[WorkerId, messages.FromWorkerBody], None],
        storage: Callable[[messages.RequestStorage, WorkerConnection], None],
        complain: Callable[[str], None],
    ) -> None:
        self.path = path
        self._admit = admit
        self._received = received
        self._storage = storage
        self._complain = complain
        self._connections: set[WorkerConnection] = set()
        self._workers: dict[WorkerId, WorkerConnection] = {}
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Listen. Raises OSError when the path exists, or exceeds the kernel's limit (107 bytes)."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(self.path)
            self._file = os.lstat(self.path)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self.accept_pending)

    @property
    def is_lost(self) -> bool:
        """Return True if the file of the socket was deleted. No worker can connect then; connected ones stay so."""
        try:
            return not os.path.samestat(os.lstat(self.path), self._file)
        except OSError:
            return True

    def reopen(self, path: str) -> None:
        """Listen at another path, or at the same one again. Raises what ``open`` raises; call it again then."""
        self._stop_listening()
        self.path = path
        self.open()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Stop listening, and close the connections of all workers. May be called twice."""
        if self._listener is None:
            return
        self._stop_listening()
        for connection in list(self._connections):
            connection.close()
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), self._file):  # not the socket of a later job's agent
                os.unlink(self.path)

    def is_connected(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def send(self, worker: WorkerId, data: bytes) -> None:
        """Send an encoded message. No effect if the worker is not connected."""
        if worker in self._workers:
            self._workers[worker].send(data)

    def drain(self, worker: WorkerId) -> None:
        """Pass on all that a worker has sent before it ended."""
        self.accept_pending()
        for connection in list(self._connections):
            if connection.worker in (None, worker):
                connection.receive_pending()

    def disconnect(self, worker: WorkerId) -> None:
        if worker in self._workers:
            self._workers[worker].close()

    def accept_pending(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            pid, uid = _peer_of(connection)
            if uid != os.getuid():
                self._complain(f"refused a connection of process {pid}, which belongs to user {uid}")
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
            if isinstance(message, messages.RequestStorage):
                self._storage(message, connection)
                return
            if isinstance(message, messages.RunUsed):
                self._received(message.worker, message)
                return
            assert isinstance(message, messages.Hello)
            connection.worker = message.worker
            self._workers[message.worker] = connection
        self._received(connection.worker, message)

    def _check(self, message: messages.FromWorkerBody) -> str:
        if not isinstance(message, messages.Hello | messages.RequestStorage | messages.RunUsed):
            return "its first message is not Hello"
        if message.protocol != messages.PROTOCOL_VERSION:
            return f"it uses protocol {message.protocol}, the agent protocol {messages.PROTOCOL_VERSION}"
        if message.worker in self._workers and isinstance(message, messages.Hello):
            return f"it claims to be {message.worker}, which is connected already"
        return self._admit(message.worker)

    def refuse(self, connection: WorkerConnection, reason: str) -> None:
        who = connection.worker or "a process"
        self._complain(f"disconnected {who}: {reason}")
        connection.close()

    def forget(self, connection: WorkerConnection) -> None:
        self._connections.discard(connection)
        if connection.worker is not None and self._workers.get(connection.worker) is connection:
            del self._workers[connection.worker]


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end (SO_PEERCRED, unix(7))."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
