"""Probes of links between hosts: only a connection that both kernels open is an answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from elasticstate.core.types import LinksProbed
from elasticstate.net.messages import ProbeOrder
from elasticstate.net.reach import Probes, is_reached
from tests.kit.ports import closed_port

LIMIT_S = 0.4


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A port of a process that accepts no connections, as one that is stopped."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as port:
        yield port


def address_of(port: socket.socket) -> str:
    return f"127.0.0.1:{port.getsockname()[1]}"


def fill(port: socket.socket) -> list[socket.socket]:
    """Fill the queue of a port, so that its kernel drops all further packets that would open connections."""
    clients = []
    while True:
        client = socket.socket()
        clients.append(client)
        client.settimeout(0.1)
        try:
            client.connect(port.getsockname())
        except TimeoutError:
            return clients


def test_a_process_that_stands_still_is_reached(port: socket.socket) -> None:
    begun = time.monotonic()
    assert asyncio.run(is_reached(address_of(port), 30.0))
    assert time.monotonic() - begun < 10.0


def test_a_port_whose_packets_are_dropped_is_not_reached_and_tried_until_the_limit(port: socket.socket) -> None:
    clients = fill(port)
    begun = time.monotonic()
    assert not asyncio.run(is_reached(address_of(port), LIMIT_S))
    assert time.monotonic() - begun >= LIMIT_S
    for client in clients:
        client.close()


def test_a_refusal_is_no_answer() -> None:
    """It may come from a firewall in between."""
    with closed_port() as (_, port):
        begun = time.monotonic()
        assert not asyncio.run(is_reached(address_of(port), LIMIT_S))
        assert time.monotonic() - begun >= LIMIT_S


def test_a_later_attempt_is_enough() -> None:
    async def opened_late() -> bool:
        with closed_port() as (_, port):
            reached = asyncio.ensure_future(is_reached(address_of(port), 10 * LIMIT_S))
            await asyncio.sleep(0.05)  # the first attempt has been refused
            assert not reached.done()
            port.listen()
            return await reached

    begun = time.monotonic()
    assert asyncio.run(opened_late())
    assert time.monotonic() - begun < 10.0


def test_an_order_is_answered_with_the_hosts_that_are_not_reached(port: socket.socket) -> None:
    async def answer() -> LinksProbed:
        sent: asyncio.Future[LinksProbed] = asyncio.get_running_loop().create_future()
        Probes("a", sent.set_result).begin(ProbeOrder(7, (("b", address_of(port)), ("c", closed)), LIMIT_S))
        return await sent

    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = address_of(other)
    assert asyncio.run(answer()) == LinksProbed("a", 7, ("c",))


def test_the_last_order_replaces_the_one_before_and_a_cancelled_one_has_no_answer(port: socket.socket) -> None:
    async def answers() -> list[LinksProbed]:
        sent: list[LinksProbed] = []
        probes = Probes("a", sent.append)
        probes.begin(ProbeOrder(1, (("c", closed),), LIMIT_S))
        await asyncio.sleep(0)
        probes.begin(ProbeOrder(2, (("b", address_of(port)),), LIMIT_S))
        while not sent:
            await asyncio.sleep(0.01)
        probes.begin(ProbeOrder(3, (("b", address_of(port)),), LIMIT_S))
        probes.cancel()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        return sent

    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = address_of(other)
    assert asyncio.run(answers()) == [LinksProbed("a", 2)]
