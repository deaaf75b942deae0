"""TCP connections from one host to another, tunnelled through TLS that only processes of the job can speak.

``mpirun`` listens on the loopback interface of its host, and authenticates no client::

    worker ── loopback ── tunnel (its agent) ══ TLS ══ relay (beside mpirun) ── loopback ── mpirun
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress

from elasticstate.net.names import LOCALHOST
from elasticstate.net.stream import reason_of
from elasticstate.net.trust import NAME, Trust

_PIECE_BYTES = 1 << 16


class Relay:
    """Connects authenticated clients to a port of the loopback interface of this host."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._clients: dict[str, set[asyncio.StreamWriter]] = {}  # by the host of the client
        self._server: asyncio.Server | None = None

    async def open(self, trust: Trust, proof_timeout_s: float) -> int:
        """Listen, and return the port. Raises OSError."""
        self._server = await asyncio.start_server(
            self._serve, "0.0.0.0", 0, ssl=trust.server, ssl_handshake_timeout=proof_timeout_s
        )
        return port_of(self._server)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError, ValueError):  # the client has disconnected: close this connection
            host = (await reader.readline()).decode().rstrip()
            self._clients.setdefault(host, set()).add(writer)
            try:
                await _connect(reader, writer, *await asyncio.open_connection(LOCALHOST, self._to_port))
            finally:
                self._clients[host].discard(writer)
        writer.close()

    def drop(self, host: str) -> None:
        """Abort all connections from this host: data that has not arrived here yet never reaches the port."""
        for writer in self._clients.get(host, ()):
            writer.transport.abort()

    def close(self) -> None:
        """Stop listening. Established connections stay open."""
        if self._server is not None:
            self._server.close()


async def open_tunnel(
    trust: Trust, own_host: str, address: tuple[str, int], timeout_s: float, log: Callable[[str], None]
) -> asyncio.Server:
    """Listen on the loopback interface, and tunnel each connection to a relay. Raises ConnectionError: no relay.

    ``own_host``: the name by which the relay identifies connections from this host.
    """
    _, writer = await _dial(trust, address, timeout_s)
    writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await _dial(trust, address, timeout_s)
            far_writer.write(f"{own_host}\n".encode())
            await _connect(reader, writer, far_reader, far_writer)
        except ConnectionError as error:
            log(f"lost a connection to mpirun: {error}")
        writer.close()

    return await asyncio.start_server(serve, LOCALHOST, 0)


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _dial(
    trust: Trust, address: tuple[str, int], timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the relay. Raises ConnectionError with the reason."""
    dialling = asyncio.ensure_future(asyncio.open_connection(*address, ssl=trust.client, server_hostname=NAME))
    try:  # not asyncio.wait_for: see net/stream.py
        await asyncio.wait({dialling}, timeout=timeout_s)
        if not dialling.done():
            raise asyncio.TimeoutError
        return dialling.result()
    except (OSError, ssl.SSLError, asyncio.TimeoutError) as error:
        raise ConnectionError(f"{address[0]}:{address[1]}: {reason_of(error)}") from None
    finally:
        dialling.cancel()


async def _connect(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Pass data in both directions until one of them has ended; then end the other."""
    directions = {asyncio.ensure_future(_copy(*ends)) for ends in ((reader, far_writer), (far_reader, writer))}
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, ssl.SSLError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
