"""The status of an agent, which a Unix socket on its host gives: for the probes of Kubernetes, and for people.

The agent answers from its event loop. So an answer proves that the agent is not stuck.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from elasticstate.errors import OptionError

_MOST_BYTES = 4096


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
        writer.write(f"{int(is_ready)} {text}".encode()[:_MOST_BYTES])
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
        while data := connection.recv(_MOST_BYTES):
            answer += data
    number, _, text = answer.decode(errors="replace").partition(" ")
    return AgentStatus(number == "1", text)
