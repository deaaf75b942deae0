"""The socket between an agent and its template process (worker/template.py).

SOCK_SEQPACKET, one datagram is one message. The template sends IMPORTING with the name of each module of --preload
before it imports this; then READY, or the reason why it cannot serve: the fault of the named module, if any. Then the
agent sends one datagram for each worker, with four descriptors: the request (a memfd, as it may be long), stdout,
stderr, and a socket for the answer to this one request.

On the answer's socket, the new worker sends its process id, and waits for GO. The end of the socket means: the other
end has given up. So a worker that nobody expects any more never runs its script.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

import msgspec

READY = "ready"
IMPORTING = "importing "
PADDING_VARIABLE = "ELASTICSTATE_PADDING"  # space at the end of the template's environment, for a worker's variables
_GO = b"go"
_FORK = b"fork"
_MOST_BYTES = 64 * 1024
_DESCRIPTORS = 4


class ForkRequest(msgspec.Struct, frozen=True):
    """Everything that a worker needs to run a Python command."""

    command: tuple[str, ...]  # the interpreter as the user has named it, and its arguments: ("python", "train.py")
    directory: str
    environment: dict[str, str]


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

    def request(self, request: ForkRequest, stdout: int, stderr: int) -> PendingFork:
        """Request a worker. Raises OSError if the template has ended, or does not read its requests."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        answer = PendingFork(mine)
        packed = os.memfd_create("elasticstate-fork")
        try:
            _write_all(packed, msgspec.msgpack.encode(request))
            socket.send_fds(self._socket, [_FORK], [packed, stdout, stderr, other.fileno()])
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


def _write_all(fd: int, data: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(data)


class ReceivedRequest:
    """A request in the template process and in the worker that forks from it."""

    def __init__(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        self.request = request
        self.stdout, self.stderr, answer = descriptors
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
        os.close(self.stdout)
        os.close(self.stderr)


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
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        packed, *rest = descriptors
        with open(packed, "rb") as file:
            file.seek(0)
            return ReceivedRequest(msgspec.msgpack.decode(file.read(), type=ForkRequest), rest)

    def close(self) -> None:
        self._socket.close()
