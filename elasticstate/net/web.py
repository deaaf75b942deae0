"""A port that speaks HTTP: limits the connections, their time and the size of their headers, whatever serves them.

A request reaches its handler when its header is complete. Until then a connection costs a few kB, and no thread. Each
connection is for one request, which must be over within the timeout, unless its handler calls ``stay``.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from elasticstate.net.names import is_loopback, port_of, without_carrier
from elasticstate.net.trust import BACKLOG, LocalPeers, Strangers

MOST_HEADER_BYTES = 16 * 1024
_END_OF_HEADER = b"\r\n\r\n"


class Visitor(asyncio.Protocol):
    """One connection to a port that speaks HTTP."""

    def __init__(self, port: WebPort, peer: str, user: str) -> None:
        """``user``: see LocalPeers.user_of."""
        self.peer = peer
        self.user = user
        self._port = port
        self._begin = bytearray()  # of the request, until its header is complete
        self._handler: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._stays = False
        self._is_over = False
        self._deadline = self._after_timeout(self._time_out)

    @property
    def is_loopback(self) -> bool:
        """True if the connection came over the loopback interface."""
        own = self._transport.get_extra_info("sockname") if self._transport is not None else None
        return own is not None and is_loopback(without_carrier(own[0]))

    def authenticated(self) -> None:
        """Count the connection among strangers no more: its request has the token."""
        self._port.strangers.remove(self)

    def stay(self) -> None:
        """Let the connection outlive the timeout, as long as its peer reads what is sent."""
        self._stays = True
        self._deadline.cancel()

    def refused(self, reason: str) -> None:
        """Report that the request is refused."""
        self._port.strangers.refused(self.peer, f"{self._port.name}: {reason}")

    def dismiss(self, reason: str) -> None:
        """Close the connection at once, and report the reason."""
        self.refused(reason)
        self.close()

    def close(self) -> None:
        """Close the connection at once."""
        self._is_over = True
        self._deadline.cancel()
        self._port.strangers.remove(self)
        if self._transport is not None:
            self._transport.abort()

    def _time_out(self) -> None:
        if self._handler is None and not self._begin:
            self.close()  # browsers open connections in advance
        else:
            self.dismiss("timed out: the request is not complete, or its answer is not read")

    def _after_timeout(self, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._port.strangers.timeout_s, call)

    # ------------------------------------------------------------------------------------------------------ for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_over:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._handler is not None:
            self._handler.data_received(data)
            return
        searched = max(0, len(self._begin) - len(_END_OF_HEADER))
        self._begin += data
        end = self._begin.find(_END_OF_HEADER, searched)
        if (end if end >= 0 else len(self._begin)) > MOST_HEADER_BYTES:
            self.dismiss("the header of the request is too long")
        elif end >= 0:
            assert self._transport is not None
            begin, self._begin = bytes(self._begin), bytearray()
            self._handler = self._port.handler()
            self._handler.connection_made(self._transport)
            self._handler.data_received(begin)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._handler is not None else None

    def pause_writing(self) -> None:
        if self._stays:
            self._deadline = self._after_timeout(lambda: self.dismiss("the peer does not read the stream"))
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._stays:
            self._deadline.cancel()
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.close()
        self._port.forget(self)
        if self._handler is not None:
            self._handler.connection_lost(error)


class WebPort:
    """A socket that listens already, with the limits of a port. ``handler()`` makes the handler of one request."""

    def __init__(
        self, name: str, listening: socket.socket, strangers: Strangers, handler: Callable[[], asyncio.Protocol]
    ) -> None:
        self.name, self.strangers, self.handler = name, strangers, handler
        self.port = port_of(listening)
        self._listening = listening
        self._visitors: dict[Visitor, asyncio.Task[None]] = {}
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._accepting = asyncio.ensure_future(strangers.accept(listening, self._accepted))

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._listening.close()
        connecting = list(self._visitors.values())
        for visitor in list(self._visitors):
            visitor.close()
        if connecting:
            await asyncio.wait(connecting)

    def forget(self, visitor: Visitor) -> None:
        self._visitors.pop(visitor, None)

    def _accepted(self, connection: socket.socket, peer: str, local_peers: LocalPeers) -> None:
        visitor = Visitor(self, peer, local_peers.user_of(connection))
        self.strangers.add(visitor, visitor.user)
        self._visitors[visitor] = asyncio.ensure_future(self._connect(connection, visitor))

    async def _connect(self, connection: socket.socket, visitor: Visitor) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: visitor, connection)
        except OSError:  # the peer has gone
            connection.close()
            visitor.connection_lost(None)


# ---------------------------------------------------------------------------------------------------------- http server
# HTTP for a page that a function makes, without a library: one request for each connection, without a body.


_REQUEST_LINE = re.compile(r"([A-Z]+) ([!-~]+) HTTP/1\.([01])")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")  # RFC 9110, section 5


@dataclass(frozen=True, slots=True)
class Request:
    """A request. The names of the headers are in lower case."""

    visitor: Visitor
    method: str
    target: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    status: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain; charset=utf-8"})


class RequestHandler(asyncio.Protocol):
    """Handler of one request whose header is complete (see WebPort)."""

    def __init__(self, answer: Callable[[Request], Awaitable[Answer]]) -> None:
        """``answer`` must not raise."""
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._task is not None or self._transport is None:
            return
        visitor = cast("Visitor", self._transport.get_protocol())
        try:
            request = _parsed(data, visitor)
        except ValueError as error:
            visitor.refused("malformed request")
            self._send(Answer("400 Bad Request", f"Malformed request: {error}.\n".encode()))
            return
        self._task = asyncio.ensure_future(self._respond(request))

    async def _respond(self, request: Request) -> None:
        self._send(await self._answer(request))

    def _send(self, answer: Answer) -> None:
        if self._transport is None:
            return
        headers = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
        lines = [f"HTTP/1.1 {answer.status}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        self._transport.write("\r\n".join(lines).encode("latin-1") + answer.body)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._task is not None:
            self._task.cancel()


def _parsed(data: bytes, visitor: Visitor) -> Request:
    """Read a request, and ignore what follows its header. Raises ValueError."""
    first, *lines = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = _REQUEST_LINE.fullmatch(first)
    if words is None:
        raise ValueError("the first line must be METHOD TARGET HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise ValueError("a header must be NAME: VALUE")
        name, value = found[1].lower(), found[2].rstrip(" \t")
        if name in headers and name == "host":
            raise ValueError("there must be one Host")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if words[3] == "1" and "host" not in headers:
        raise ValueError("there must be a Host")
    return Request(visitor, words[1], words[2], headers)
