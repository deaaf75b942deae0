"""The Unix sockets of an agent: to its host's workers, to its template process, and for its status; and the socket of
the store of plain workers.

That to the workers is SOCK_SEQPACKET: one datagram is one message. The worker's end is handed over to its sentinel
(native/sentinel.cpp). The agent's end never blocks its event loop: messages that a worker does not read stay in a
queue, at most until its heartbeat times out. On a second connection the agent passes descriptors (unix(7)); the worker
keeps it, because the path of the socket may be deleted. Both ends verify that the other has the same user.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.errors import OptionError
from elasticstate.net import messages
from elasticstate.net.names import listening_socket, port_of

MAX_DATAGRAM_BYTES = 128 * 1024  # well below the kernel's default for a socket's send buffer
_CUT = "\n... cut ...\n"
_MOST_DESCRIPTORS = 5


def encode_from_worker(message: messages.FromWorkerBody) -> bytes:
    """Encode a message for the worker's socket. A traceback that is too long is cut in its middle."""
    data = messages.encode(message)
    if len(data) > MAX_DATAGRAM_BYTES and isinstance(message, messages.GenerationFailure):
        half = MAX_DATAGRAM_BYTES // 10  # characters, of up to four bytes each
        error = message.error[:half] + _CUT + message.error[-half:]
        data = messages.encode(msgspec.structs.replace(message, error=error))
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

    def try_send(self, message: messages.FromWorkerBody) -> None:
        """Send a message, unless the agent is gone or does not read."""
        with suppress(OSError):
            self._socket.send(encode_from_worker(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self) -> messages.ToWorkerBody | None:
        """Return the next message; None when the agent is gone. Raises BlockingIOError when none has arrived."""
        try:
            data = self._socket.recv(MAX_DATAGRAM_BYTES, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            return None
        return messages.decode_to_worker(data) if data else None

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
        answer = messages.decode_to_worker(data) if data else None
        return answer if isinstance(answer, messages.Storage) else None, descriptors

    def close(self) -> None:
        self._link.close()


def _close(descriptors: Iterable[int]) -> None:
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
                socket.send_fds(self._socket, [messages.encode_to_worker(message)], descriptors)

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
                message = messages.decode_from_worker(data)
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
        """Listen, and accept workers on this event loop. Raises what ``bind`` raises."""
        self.bind()
        self.serve()

    def bind(self) -> None:
        """Listen, on any thread: the file system may delay this. Raises OSError when the path exists, or exceeds the
        kernel's limit (107 bytes)."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(self.path)
            self._file = os.lstat(self.path)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self._listener = listener

    def serve(self) -> None:
        """Accept workers on this event loop from now on."""
        assert self._listener is not None, "bound"
        asyncio.get_running_loop().add_reader(self._listener, self.accept_pending)

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
            if isinstance(message, messages.Metrics):
                connection.worker = message.worker
                return
            assert isinstance(message, messages.Hello)
            connection.worker = message.worker
            self._workers[message.worker] = connection
        self._received(connection.worker, message)

    def _check(self, message: messages.FromWorkerBody) -> str:
        if not isinstance(message, messages.Hello | messages.RequestStorage | messages.RunUsed | messages.Metrics):
            return "its first message is not Hello"
        if message.protocol != messages.PROTOCOL_VERSION:
            return f"it uses protocol {message.protocol}, the agent protocol {messages.PROTOCOL_VERSION}"
        if message.worker in self._workers and isinstance(message, messages.Hello):
            return f"it claims to be {message.worker}, which is connected already"
        return "it names no worker" if message.worker is None else self._admit(message.worker)

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


# ------------------------------------------------------------------------------------------------------------ fork link
# The socket between an agent and its template process (worker/template.py).
#
# SOCK_SEQPACKET, one datagram is one message. The template sends IMPORTING with the name of each module of --preload
# before it imports this; then READY, or the reason why it cannot serve: the fault of the named module, if any. Then
# the agent sends one datagram for each worker, with five descriptors: the request (a memfd, as it may be long),
# stdin, stdout, stderr, and a socket for the answer to this one request.
#
# On the answer's socket, the new worker sends its process id, and waits for GO. The end of the socket means: the
# other end has given up. So a worker that nobody expects any more never runs its script.


READY = "ready"
IMPORTING = "importing "
PADDING_VARIABLE = "ELASTICSTATE_PADDING"  # space at the end of the template's environment, for a worker's variables
_GO = b"go"
_FORK = b"fork"
_MOST_BYTES = 64 * 1024
_DESCRIPTORS = 5
StandardDescriptors = tuple[int, int, int]
"""A worker's stdin, stdout and stderr."""


@dataclass(frozen=True)
class ForkRequest:
    """Everything that a worker needs to run a Python command."""

    command: tuple[str, ...]  # the interpreter as the user has named it, and its arguments: ("python", "train.py")
    directory: str
    environment: dict[str, str]

    def packed(self) -> bytes:
        """Return the request as bytes. Arguments and variables may be no UTF-8, as a path in Latin-1."""
        variables = {os.fsencode(name): os.fsencode(value) for name, value in self.environment.items()}
        return msgspec.msgpack.encode((list(map(os.fsencode, self.command)), os.fsencode(self.directory), variables))

    @classmethod
    def unpacked(cls, packed: bytes) -> ForkRequest:
        command, directory, variables = msgspec.msgpack.decode(
            packed, type=tuple[list[bytes], bytes, dict[bytes, bytes]]
        )
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
        return cls(tuple(map(os.fsdecode, command)), os.fsdecode(directory), environment)


class PendingFork:
    """The agent's end of the socket for one answer."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end  # non-blocking

    async def receive(self) -> int:
        """Return the worker's process id. Raises ConnectionError if the template or the worker has ended."""
        text = await _receive(self._socket)
        if not text:
            raise ConnectionError("ended before a worker could fork from it")
        return int(text)

    def go(self) -> None:
        """Let the worker run its command. Raises OSError if the worker has ended."""
        self._socket.send(_GO)

    def close(self) -> None:
        self._socket.close()


class TemplateLink:
    """The agent's end of the socket."""

    def __init__(self) -> None:
        """``child_end``: the descriptor that the template process inherits; close it after the start."""
        self._socket, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.child_end = child.detach()
        os.set_inheritable(self.child_end, True)

    async def receive(self) -> str:
        """Return IMPORTING and a module, READY, the reason why the template cannot serve, or "" if it has ended."""
        return (await _receive(self._socket)).decode(errors="replace")

    def request(self, request: ForkRequest, descriptors: StandardDescriptors) -> PendingFork:
        """Request a worker. Raises OSError if the template has ended, or does not read its requests."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        answer = PendingFork(mine)
        packed = os.memfd_create("elasticstate-fork")
        try:
            with open(packed, "wb", closefd=False) as file:
                file.write(request.packed())
            socket.send_fds(self._socket, [_FORK], [packed, *descriptors, other.fileno()])
        except OSError:
            answer.close()
            raise
        finally:
            os.close(packed)
            other.close()
        return answer

    def close(self) -> None:
        self._socket.close()


async def _receive(end: socket.socket) -> bytes:
    """Return the next datagram; b"" if the other end is closed."""
    try:
        return await asyncio.get_running_loop().sock_recv(end, _MOST_BYTES)
    except ConnectionResetError:
        return b""


class ReceivedRequest:
    """A request in the template process and in the worker that forks from it."""

    def __init__(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        self.request = request
        *standard, answer = descriptors
        self.standard = tuple(standard)  # stdin, stdout, stderr
        self._answer = socket.socket(fileno=answer)

    def begin(self) -> bool:
        """In the worker: send the process id, and wait for GO. Return False if the agent has given up."""
        try:
            self._answer.send(str(os.getpid()).encode())
            return self._answer.recv(len(_GO)) == _GO
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptors of the request in this process."""
        self._answer.close()
        _close(self.standard)


class AgentLink:
    """The template's end of the socket. It blocks."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)

    def send(self, text: str) -> None:
        self._socket.send(text.encode())

    def next(self) -> ReceivedRequest | None:
        """Wait for the next request; None: the agent has ended."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data or len(descriptors) != _DESCRIPTORS:
            _close(descriptors)
            return None
        packed, *rest = descriptors
        with open(packed, "rb") as file:
            file.seek(0)
            return ReceivedRequest(ForkRequest.unpacked(file.read()), rest)

    def close(self) -> None:
        self._socket.close()


class StoreListener:
    """A socket that listens, but accepts no connection itself: connections wait until a process serves the socket."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of ``host``. Raises OSError."""
        self._host = host
        self._socket = listening_socket(host)

    @property
    def port(self) -> int:
        return port_of(self._socket)

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def fileno(self) -> int:
        return self._socket.fileno()

    async def first_connection(self) -> None:
        """Wait for the first connection."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            if not arrived.done():
                arrived.set_result(None)

        loop.add_reader(self._socket, readable)
        try:
            await arrived
        finally:
            loop.remove_reader(self._socket)

    def close(self) -> None:
        """Close this process's descriptor of the socket."""
        self._socket.close()


# --------------------------------------------------------------------------------------------------------------- status
# The status of an agent, for the probes of Kubernetes, and for people.
#
# The agent answers from its event loop. So an answer proves that the agent is not stuck.


_MOST_STATUS_BYTES = 4096


class AgentStatus(NamedTuple):
    """The status of an agent. ``is_ready``: it serves a driver."""

    is_ready: bool
    text: str


@asynccontextmanager
async def answering(path: str, status: Callable[[], AgentStatus]) -> AsyncIterator[None]:
    """Answer at the socket ``path``, which only this user can use. Nothing happens with "". Raises OptionError."""
    if not path:
        yield
        return

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_ready, text = status()
        writer.write(f"{int(is_ready)} {text}".encode()[:_MOST_STATUS_BYTES])
        with suppress(OSError):  # the other end has gone
            await writer.drain()
        writer.close()

    umask = os.umask(0o177)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)  # of an agent that was killed
        server = await asyncio.start_unix_server(answer, path)
    except OSError as error:
        raise OptionError(
            f"--status-socket: {path!r}: cannot be created ({error}). Choose a path that this user can write to."
        ) from None
    finally:
        os.umask(umask)
    try:
        yield
    finally:
        server.close()
        with suppress(FileNotFoundError):
            os.unlink(path)


def ask_agent(path: str, timeout_s: float) -> AgentStatus:
    """Return the status of the agent at a socket. Raises OSError (TimeoutError: the agent does not answer)."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        answer = b""
        while data := connection.recv(_MOST_STATUS_BYTES):
            answer += data
    number, _, text = answer.decode(errors="replace").partition(" ")
    return AgentStatus(number == "1", text)
