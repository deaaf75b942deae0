"""HTTP for a page that a function makes, without a library: one request for each connection, without a body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from elasticstate.net.web_port import Visitor

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
