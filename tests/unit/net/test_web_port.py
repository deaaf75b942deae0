"""The limits of a port that speaks HTTP, and those of all ports together."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from typing import cast

import pytest

from elasticstate.net import trust as limits
from elasticstate.net.names import listening_socket
from elasticstate.net.trust import Crowd, LocalPeers, Strangers
from elasticstate.net.web import MOST_HEADER_BYTES, Answer, Request, RequestHandler, WebPort

HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HALF + b"\r\n"
LARGE = 32 << 20
ELSEWHERE = ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1", "2001:db8::2")


def at_port(
    scenario: Callable[[WebPort, list[str]], Awaitable[None]], timeout_s: float = 20.0, stays: bool = False
) -> list[str]:
    """Run ``scenario(port, refusals)`` at a port that answers with 32 MB. Return the refusals."""
    refusals: list[str] = []

    async def answer(request: Request) -> Answer:
        if stays:
            request.visitor.stay()
        return Answer("200 OK", bytes(LARGE))

    async def run() -> None:
        strangers = Strangers(timeout_s, lambda _, reason: refusals.append(reason))
        listening = listening_socket("127.0.0.1", 0)
        port = WebPort("page", listening, strangers, lambda: RequestHandler(answer))
        await scenario(port, refusals)
        await port.close()
        assert len(strangers) == 0

    asyncio.run(run())
    return refusals


async def asked(port: WebPort, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(data)
    return reader, writer


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), 20) == b""
    except ConnectionResetError:
        return True


def test_a_request_may_come_in_pieces_and_gets_one_answer() -> None:
    async def ask(port: WebPort, _: list[str]) -> None:
        reader, writer = await asked(port, b"")
        for byte in WHOLE:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert len(await reader.read()) == LARGE
        writer.close()

    assert at_port(ask) == []


def test_half_a_request_times_out_and_a_silent_connection_is_closed_without_a_line() -> None:
    async def ask(port: WebPort, _: list[str]) -> None:
        for data in (HALF, b""):
            reader, writer = await asked(port, data)
            assert await is_closed(reader)
            writer.close()

    assert at_port(ask, 0.2) == ["page: timed out: the request is not complete, or its answer is not read"]


def test_a_long_header_is_refused_at_once() -> None:
    async def ask(port: WebPort, _: list[str]) -> None:
        reader, writer = await asked(port, HALF + b"X: " + b"x" * MOST_HEADER_BYTES)
        assert await is_closed(reader)
        writer.close()

    assert at_port(ask) == ["page: the header of the request is too long"]


@pytest.mark.parametrize(
    ("stays", "reason"), [(True, "the peer does not read the stream"), (False, "timed out: the request is not")]
)
def test_an_answer_that_nobody_reads_ends(stays: bool, reason: str) -> None:
    async def ask(port: WebPort, refusals: list[str]) -> None:
        _, writer = await asked(port, WHOLE)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not refusals:
            await asyncio.sleep(0.01)
        writer.close()

    (refusal,) = at_port(ask, 0.3, stays)
    assert refusal.startswith(f"page: {reason}")


def test_beyond_the_limit_of_all_ports_the_oldest_is_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNAUTHENTICATED", 10)

    async def crowd(port: WebPort, refusals: list[str]) -> None:
        with ExitStack() as stack:
            clients = []
            for _ in range(14):
                clients.append(await asked(port, HALF))
                stack.callback(clients[-1][1].close)
            for reader, _ in clients[:4]:
                assert await is_closed(reader)
            while len(refusals) < 4:
                await asyncio.sleep(0.01)
            reader, writer = await asked(port, WHOLE)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    assert set(at_port(crowd)) == {"page: too many unauthenticated connections"}


def test_the_oldest_of_the_user_with_the_most_goes_first() -> None:
    crowd = Crowd[int]()
    for member, user in enumerate("aabbbc"):
        crowd.add(member, user)
    gone = []
    while len(crowd):
        gone.append(crowd.first_to_go())
        crowd.discard(gone[-1])
    assert gone == [2, 0, 3, 1, 4, 5]
    assert crowd.number_of("a") == 0


def test_connections_count_by_user_of_this_machine_or_by_the_other_machine() -> None:
    with ExitStack() as stack:
        peers = stack.enter_context(closing(LocalPeers()))
        listening = stack.enter_context(listening_socket("127.0.0.1", 0))
        stack.enter_context(socket.create_connection(listening.getsockname()))
        connection = stack.enter_context(listening.accept()[0])
        assert peers.user_of(connection) in (f"user {os.geteuid()}", "this machine")
        found = [peers.user_of(cast("socket.socket", Elsewhere(address))) for address in ELSEWHERE]
    assert found == ["192.0.2.7", "192.0.2.7", "2001:db8::/64", "2001:db8::/64"]


class Elsewhere:
    """The facts about a connection from another machine."""

    def __init__(self, address: str) -> None:
        self._address = address

    def getpeername(self) -> tuple[str, int]:
        return self._address, 1

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 2
