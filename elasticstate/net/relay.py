"""TCP connections from one host to another, led through TLS that only the job's own processes can speak.

``mpirun`` listens on the loopback interface of its host, and asks nobody who comes for a proof::

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
    """Leads who belongs to the job to a port of the loopback interface of this host."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._from: dict[str, set[asyncio.StreamWriter]] = {}  # by the host that they come from
        self._server: asyncio.Server | None = None

    async def open(self, trust: Trust, proof_timeout_s: float) -> int:
        """Its own port. Raises OSError."""
        self._server = await asyncio.start_server(
            self._meet, "0.0.0.0", 0, ssl=trust.server, ssl_handshake_timeout=proof_timeout_s
        )
        return port_of(self._server)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError, ValueError):  # whoever it was has gone: then this connection ends
            host = (await reader.readline()).decode().rstrip()
            self._from.setdefault(host, set()).add(writer)
            try:
                await _join(reader, writer, *await asyncio.open_connection(LOCALHOST, self._to_port))
            finally:
                self._from[host].discard(writer)
        writer.close()

    def drop(self, host: str) -> None:
        """Break off what comes from there: nothing that it has said, and that is not here yet, gets through."""
        for writer in self._from.get(host, ()):
            writer.transport.abort()

    def close(self) -> None:
        """What has been connected stays so."""
        if self._server is not None:
            self._server.close()


async def open_tunnel(
    trust: Trust, own_host: str, address: tuple[str, int], timeout_s: float, complain: Callable[[str], None]
) -> asyncio.Server:
    """Lead what dials a port of the loopback interface here to a relay. Raises ConnectionError: there is none.

    ``own_host``: the name of this host, by which the relay knows what comes from here.
    """
    _, writer = await _dial(trust, address, timeout_s)
    writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await _dial(trust, address, timeout_s)
            far_writer.write(f"{own_host}\n".encode())
            await _join(reader, writer, far_reader, far_writer)
        except ConnectionError as error:
            complain(str(error))
        writer.close()

    return await asyncio.start_server(meet, LOCALHOST, 0)


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _dial(
    trust: Trust, address: tuple[str, int], timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises ConnectionError with the reason."""
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


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Until one of the two has ended; then the other one does."""
    ways = {asyncio.ensure_future(_pass_on(*way)) for way in ((reader, far_writer), (far_reader, writer))}
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        far_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, ssl.SSLError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
