"""The tunnel to mpirun on another host: real sockets, real TLS, real strangers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from elasticstate.mpi.broker import Relay, open_tunnel
from elasticstate.net.names import LOCALHOST, port_of
from elasticstate.net.trust import NAME, Trust

TRUST = Trust("t" * 32)
SOON_S = 30.0


class Service:
    """A service without authentication. It sends back the bytes that it receives, in capitals."""

    def __init__(self) -> None:
        self.visitors = 0
        self.left = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visitors += 1
        self.writers.append(writer)
        while data := await reader.read(1 << 16):
            writer.write(data.upper())
            await writer.drain()
        self.left.set()
        writer.close()


@asynccontextmanager
async def service(proof_timeout_s: float) -> AsyncIterator[tuple[Service, Relay, int]]:
    """Yield a service, a relay to it, and the port of the relay."""
    asked, before = Service(), asyncio.all_tasks()
    server = await asyncio.start_server(asked.meet, LOCALHOST, 0)
    relay = Relay(port_of(server.sockets[0]))
    yield asked, relay, await relay.open(TRUST, proof_timeout_s)
    relay.server.close()
    server.close()
    for writer in asked.writers:
        await end(writer)
    while asyncio.all_tasks() - before:  # run() has a deadline
        await asyncio.sleep(0.001)


async def end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError, ssl.SSLError):
        await writer.wait_closed()


def run(what: Callable[[Service, Relay, int], Awaitable[None]], proof_timeout_s: float = SOON_S) -> None:
    async def main() -> None:
        async with service(proof_timeout_s) as given:
            await what(*given)

    asyncio.run(asyncio.wait_for(main(), SOON_S))


def test_what_dials_the_tunnel_speaks_with_the_service() -> None:
    async def main(asked: Service, _: Relay, port: int) -> None:
        tunnel = await open_tunnel(TRUST, "here", (LOCALHOST, port), SOON_S, pytest.fail)
        conversations = [await asyncio.open_connection(LOCALHOST, port_of(tunnel.sockets[0])) for _ in range(3)]
        for number, (reader, writer) in enumerate(conversations):
            said = f"so it is {number} ".encode() * 20_000
            writer.write(said)
            assert await reader.readexactly(len(said)) == said.upper()
        for _, writer in conversations:
            await end(writer)
        await asked.left.wait()
        tunnel.close()

    run(main)


def test_when_the_service_ends_a_conversation_it_has_ended() -> None:
    async def main(asked: Service, _: Relay, port: int) -> None:
        tunnel = await open_tunnel(TRUST, "here", (LOCALHOST, port), SOON_S, pytest.fail)
        reader, writer = await asyncio.open_connection(LOCALHOST, port_of(tunnel.sockets[0]))
        writer.write(b"a")
        assert await reader.readexactly(1) == b"A"
        asked.writers[-1].close()
        assert await reader.read() == b""
        await end(writer)
        tunnel.close()

    run(main)


def test_a_host_that_is_dropped_is_not_heard_any_more_and_the_others_are() -> None:
    async def main(_: Service, relay: Relay, port: int) -> None:
        tunnels = [
            await open_tunnel(TRUST, host, (LOCALHOST, port), SOON_S, pytest.fail) for host in ("here", "there", "here")
        ]
        conversations = [await asyncio.open_connection(LOCALHOST, port_of(tunnel.sockets[0])) for tunnel in tunnels]
        for reader, writer in conversations:
            writer.write(b"a")
            assert await reader.readexactly(1) == b"A"
        relay.drop("here")
        relay.drop("nowhere")
        for reader, writer in conversations[0], conversations[2]:
            assert await reader.read() == b""
            await end(writer)
        reader, writer = conversations[1]
        writer.write(b"b")
        assert await reader.readexactly(1) == b"B"
        await end(writer)
        for tunnel in tunnels:
            tunnel.close()

    run(main)


def test_no_stranger_gets_through() -> None:
    """A stranger that sends data, one that is silent, one without a certificate, and one with another token."""

    async def main(asked: Service, _: Relay, port: int) -> None:
        for say in (b"", b"GET / HTTP/1.0\r\n\r\n"):
            reader, writer = await asyncio.open_connection(LOCALHOST, port)
            writer.write(say)
            with suppress(ConnectionError):
                await reader.read()  # until the relay closes the connection
            await end(writer)
        nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nameless.check_hostname, nameless.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(LOCALHOST, port, ssl=nameless, server_hostname=NAME)
        writer.write(b"a")
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            await reader.readexactly(1)
        await end(writer)
        with pytest.raises(ConnectionError, match="TLS handshake failed: the peer"):
            await open_tunnel(Trust("u" * 32), "here", (LOCALHOST, port), SOON_S, pytest.fail)
        assert asked.visitors == 0

    run(main, proof_timeout_s=2)


def test_without_a_relay_there_is_no_tunnel() -> None:
    async def main(_: Service, relay: Relay, port: int) -> None:
        relay.server.close()
        with pytest.raises(ConnectionError, match=f"{port}: connection refused"):
            await open_tunnel(TRUST, "here", (LOCALHOST, port), SOON_S, pytest.fail)

    run(main)


def test_a_relay_that_is_gone_ends_what_dials_the_tunnel_and_is_told_of() -> None:
    complaints: list[str] = []

    async def main(_: Service, relay: Relay, port: int) -> None:
        tunnel = await open_tunnel(TRUST, "here", (LOCALHOST, port), SOON_S, complaints.append)
        relay.server.close()
        reader, writer = await asyncio.open_connection(LOCALHOST, port_of(tunnel.sockets[0]))
        assert await reader.read() == b""
        await end(writer)
        tunnel.close()

    run(main)
    assert [complaint.endswith("no process listens at this port") for complaint in complaints] == [True]
