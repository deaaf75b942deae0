"""The control plane, with a real server, real TLS and real strangers."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from elasticstate.core.ids import WorkerId
from elasticstate.net import control, messages, trust as limits
from elasticstate.net.control import (
    AgentStream,
    ControlServer,
    DriverStream,
    ask_status,
    dial,
)
from elasticstate.net.trust import NAME, Trust, make_token
from tests.kit.ports import closed_port

TOKEN = "t" * 32
TRUST = Trust(TOKEN)
HELLO = messages.AgentHello("h", "id", 0, 0, 1, messages.PROTOCOL_VERSION, "1")
LOCALHOST = "127.0.0.1"


class Driver:
    """A server that records its agents, messages and refusals."""

    def __init__(self, proof_timeout_s: float = 5.0) -> None:
        self.streams: list[AgentStream] = []
        self.received: list[messages.FromAgent] = []
        self.lost: list[str] = []
        self.turned_away: list[str] = []
        self.server = ControlServer(TRUST, proof_timeout_s, self)

    def agent_joined(self, stream: AgentStream) -> None:
        self.streams.append(stream)

    def agent_sent(self, stream: AgentStream, message: messages.FromAgent) -> None:
        assert stream in self.streams
        self.received.append(message)

    def agent_lost(self, stream: AgentStream, reason: str) -> None:
        assert stream in self.streams
        self.lost.append(reason)

    def status(self, as_json: bool) -> str:
        return "all is well"

    def refused(self, peer: str, reason: str) -> None:
        assert peer.startswith((f"{LOCALHOST}:", "[::1]:"))
        self.turned_away.append(reason)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{len(self.streams)} streams, {self.received}, lost {self.lost}, {self.turned_away}")
            await asyncio.sleep(0.001)


def with_driver(scenario: Callable[[Driver, int], Awaitable[None]], proof_timeout_s: float = 5.0) -> None:
    async def run() -> None:
        driver = Driver(proof_timeout_s)
        port = driver.server.listen(LOCALHOST)
        try:
            await scenario(driver, port)
        finally:
            await driver.server.stop()

    asyncio.run(run())


async def agent_at(
    port: int, trust: Trust = TRUST, first: messages.Opening | messages.FromAgent = HELLO
) -> DriverStream:
    agent = await DriverStream.dial((f"{LOCALHOST}:{port}",), trust, 5.0)
    agent.send(first)
    return agent


# ---------------------------------------------------------------------------------------------------- expected use


def test_both_directions_are_first_in_first_out() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        said = [messages.Started(WorkerId("h", slot, 1), slot) for slot in range(50)]
        for message in said:
            agent.send(message)
        await driver.until(lambda: len(driver.received) == 50)
        assert driver.received == said
        orders = [messages.StartWorker(WorkerId("h", slot, 1)) for slot in range(50)]
        for order in orders:
            driver.streams[0].send(order)
        assert [await agent.receive() for _ in orders] == orders
        await agent.close()
        await driver.until(lambda: len(driver.lost) == 1)
        assert driver.turned_away == []

    with_driver(scenario)


def test_a_large_message_goes_through_whole() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        text = "x" * (messages.MAX_MESSAGE_BYTES - 100)
        agent.send(messages.WorkerUnresponsive(WorkerId("h", 0, 1), text))
        await driver.until(lambda: bool(driver.received))
        assert driver.received == [messages.WorkerUnresponsive(WorkerId("h", 0, 1), text)]
        await agent.close()

    with_driver(scenario)


def test_beats_say_that_the_other_end_lives_and_nothing_else() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        await driver.until(lambda: bool(driver.streams))
        before = agent.received_at
        driver.streams[0].write(b"")
        await driver.until(lambda: agent.received_at > before)
        driver.streams[0].send(messages.Shutdown("over"))
        assert await agent.receive() == messages.Shutdown("over")
        await agent.close()

    with_driver(scenario)


def test_the_status_is_answered() -> None:
    async def scenario(_: Driver, port: int) -> None:
        assert await ask_status(f"{LOCALHOST}:{port}", TOKEN, 5) == "all is well"

    with_driver(scenario)


def test_the_first_address_that_is_the_drivers_is_taken() -> None:
    """The other addresses: a closed port, a listener that does not answer, and the driver of another job."""

    async def scenario(driver: Driver, port: int) -> None:
        with silent_listener() as silent, closed_port(LOCALHOST) as (closed, _):
            stranger = Driver()
            stranger.server = ControlServer(Trust("s" * 32), 5.0, stranger)
            addresses = (closed, silent, stranger.server.listen(LOCALHOST), port)
            agent = await DriverStream.dial(tuple(f"{LOCALHOST}:{p}" for p in addresses), TRUST, 5.0)
            agent.send(HELLO)
            await driver.until(lambda: bool(driver.streams))
            await agent.close()
            await stranger.server.stop()
            with pytest.raises(ConnectionError, match=f"^{LOCALHOST}:{closed}: connection refused"):
                await DriverStream.dial((f"{LOCALHOST}:{closed}", f"{LOCALHOST}:{silent}"), TRUST, 0.3)

    with_driver(scenario)


def test_an_address_of_the_other_family_is_taken_only_when_all_before_have_failed() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        silent = socket.create_server((LOCALHOST, 0))  # it never answers, so the attempt takes until the time-out
        driver.server.listen("::1", port)
        with silent:
            slow = f"{LOCALHOST}:{silent.getsockname()[1]}"
            for first, name in ((f"{LOCALHOST}:{port}", LOCALHOST), (slow, "::1")):
                began = time.monotonic()
                stream = await DriverStream.dial((first, f"[::1]:{port}"), TRUST, 1.0)
                assert stream.peer_address == name
                assert (time.monotonic() - began > 0.9) == (name == "::1")
                await stream.close()

    with_driver(scenario)


def test_an_agent_learns_that_the_driver_is_gone() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        await driver.until(lambda: len(driver.streams) == 1)
        await driver.server.stop()
        with pytest.raises(ConnectionError):
            await agent.receive()
        agent.send(messages.HostDraining("h", "SIGTERM"))
        await agent.close()  # must not block forever
        assert len(driver.lost) == 1

    with_driver(scenario)


# ------------------------------------------------------------------------------------------------ protocol violations


def test_a_connection_that_has_ended_can_be_given_up_once_more() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        await driver.until(lambda: bool(driver.streams))
        agent.abort("enough")
        await driver.until(lambda: bool(driver.lost))
        driver.streams[0].reset("it was silent")
        driver.streams[0].abort("it was silent")

    with_driver(scenario)


@pytest.mark.parametrize("token", ["", "t" * 31])
def test_a_token_that_can_be_guessed_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="characters, fewer than 32"):
        Trust(token)


def test_a_new_token_is_long_enough_and_never_the_same() -> None:
    Trust(make_token())
    assert make_token() != make_token()


def test_an_agent_without_the_token_is_refused() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        with pytest.raises(ConnectionError, match="TLS handshake failed: the peer has the token of another job"):
            await agent_at(port, Trust("u" * 32))
        await driver.until(lambda: bool(driver.turned_away))
        assert "token" in driver.turned_away[0]

    with_driver(scenario)


def test_a_stranger_that_trusts_anybody_is_refused() -> None:
    """The stranger does not verify our certificate, but our driver verifies the stranger's."""

    async def scenario(driver: Driver, port: int) -> None:
        for trust in (None, Trust("u" * 32)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if trust is None else trust.client
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            stream = await dial(f"{LOCALHOST}:{port}", context, NAME, 5.0)
            stream.send(HELLO)
            with pytest.raises(ConnectionError):
                await stream.get()
        await driver.until(lambda: len(driver.turned_away) == 2)
        assert driver.streams == []
        assert "certificate" in driver.turned_away[0]
        assert driver.turned_away[1] == "TLS handshake failed: the peer has the token of another job"

    with_driver(scenario)


def test_a_refused_agent_that_does_not_close_does_not_keep_the_driver() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        await driver.until(lambda: len(driver.streams) == 1)
        driver.streams[0].refuse("not wanted")
        await asyncio.wait_for(driver.server.stop(), 10)
        with pytest.raises(ConnectionRefusedError, match="not wanted"):
            await agent.receive()
        await agent.close()

    with_driver(scenario)


def test_another_protocol_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "VERSION", "1.5")

    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port, first=messages.AgentHello("h", "id", 0, 0, 1, 99, "9.9"))
        with pytest.raises(ConnectionRefusedError) as refusal:
            await agent.receive()
        await agent.close()
        reason = (
            f"the agent has elasticstate 9.9 (protocol 99), the driver has elasticstate 1.5 (protocol "
            f"{messages.PROTOCOL_VERSION}). Install the same version on all hosts"
        )
        assert reason in str(refusal.value)
        assert driver.streams == []
        assert driver.turned_away == [reason]

    with_driver(scenario)


def test_the_first_message_must_be_a_hello() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port, first=messages.HostDraining("h", "SIGTERM"))
        with pytest.raises(ConnectionError):
            await agent.receive()
        await agent.close()
        await driver.until(lambda: bool(driver.turned_away))
        assert driver.streams == []
        assert "received a malformed message" in driver.turned_away[0]

    with_driver(scenario)


def test_what_is_no_message_ends_the_stream() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        stream = await dial(f"{LOCALHOST}:{port}", TRUST.client, NAME, 5.0)
        stream.send(HELLO)
        stream.write(b"rubbish")
        with pytest.raises(ConnectionError):
            await stream.get()
        await driver.until(lambda: len(driver.lost) == 1)
        assert "received a malformed message" in driver.lost[0]

    with_driver(scenario)


def test_a_message_beyond_the_limit_ends_the_stream_before_it_is_read() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        await driver.until(lambda: len(driver.streams) == 1)
        agent.send(messages.WorkerUnresponsive(WorkerId("h", 0, 1), "x" * messages.MAX_MESSAGE_BYTES))
        await driver.until(lambda: len(driver.lost) == 1)
        assert driver.received == []
        assert "the limit is" in driver.lost[0]
        await agent.close()

    with_driver(scenario)


# --------------------------------------------------------------------------------------------- strangers on the port


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNAUTHENTICATED", 20)


def test_random_bytes_are_turned_away_and_told_of() -> None:
    async def scenario(driver: Driver, port: int) -> None:
        for data in (os.urandom(1000), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + os.urandom(500), b""):
            with socket.create_connection((LOCALHOST, port)) as stranger:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                count = len(driver.turned_away)
                await driver.until(lambda count=count: len(driver.turned_away) > count)
        assert driver.streams == []
        agent = await agent_at(port)
        await driver.until(lambda: len(driver.streams) == 1)
        await agent.close()

    with_driver(scenario)


def test_who_proves_nothing_in_time_is_turned_away() -> None:
    """Four strangers: silent from the start, silent in the middle of TLS, byte by byte, silent after the handshake."""

    async def scenario(driver: Driver, port: int) -> None:
        silent, half, slow = (socket.create_connection((LOCALHOST, port)) for _ in range(3))
        hello = _client_hello()
        half.sendall(hello[: len(hello) // 2])
        proven = await dial(f"{LOCALHOST}:{port}", TRUST.client, NAME, 5.0)
        for i in range(len(hello)):
            with suppress(ConnectionError):  # the driver may refuse it before the others
                slow.sendall(hello[i : i + 1])
            await asyncio.sleep(0.02)
            if len(driver.turned_away) == 4:
                break
        assert len(driver.turned_away) == 4
        assert all(reason.startswith("timed out: ") for reason in driver.turned_away), driver.turned_away
        for stranger in (silent, half, slow):
            stranger.close()
        await proven.closed()
        agent = await agent_at(port)
        await driver.until(lambda: len(driver.streams) == 1)
        await agent.close()

    with_driver(scenario, proof_timeout_s=2)


def _tls_objects() -> int:
    return sum(type(found) is ssl.SSLObject for found in gc.get_objects())


def test_a_crowd_of_silent_strangers_keeps_nobody_out(door: None) -> None:
    async def scenario(driver: Driver, port: int) -> None:
        agent = await agent_at(port)
        await driver.until(lambda: len(driver.streams) == 1)
        before = _tls_objects()
        crowd = [socket.create_connection((LOCALHOST, port)) for _ in range(300)]
        await driver.until(lambda: len(driver.turned_away) == 280)
        assert set(driver.turned_away) == {"too many unauthenticated connections"}
        assert _tls_objects() == before, "the 20 that wait cost little"
        another = await agent_at(port)
        await driver.until(lambda: len(driver.streams) == 2)
        assert driver.lost == []
        for stranger in crowd:
            stranger.close()
        await agent.close()
        await another.close()

    with_driver(scenario, proof_timeout_s=60.0)


def test_a_replayed_conversation_is_worth_nothing() -> None:
    """A stranger sends all bytes again that an agent has sent."""

    async def scenario(driver: Driver, port: int) -> None:
        recorder = await asyncio.start_server(lambda r, w: _relay(r, w, port, recorded), LOCALHOST, 0)
        recorded = bytearray()
        agent = await agent_at(recorder.sockets[0].getsockname()[1])
        agent.send(messages.Started(WorkerId("h", 0, 1), 7))
        await driver.until(lambda: len(driver.received) == 1)
        await agent.close()
        await driver.until(lambda: len(driver.lost) == 1)
        recorder.close()
        with socket.create_connection((LOCALHOST, port)) as stranger:
            stranger.sendall(bytes(recorded))
            await driver.until(lambda: len(driver.turned_away) == 1)
        assert len(recorded) > 1000
        assert len(driver.streams) == len(driver.received) == 1

    with_driver(scenario)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, recorded: bytearray) -> None:
    there, back = await asyncio.open_connection(LOCALHOST, port)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, record: bytearray | None) -> None:
        while data := await source.read(65536):
            if record is not None:
                record += data
            target.write(data)
        target.close()

    await asyncio.gather(pump(reader, back, recorded), pump(there, writer, None))


def _client_hello() -> bytes:
    """Return the first bytes of a TLS conversation."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = TRUST.client.wrap_bio(incoming, outgoing, server_hostname=NAME)
    with pytest.raises(ssl.SSLWantReadError):
        talk.do_handshake()
    return outgoing.read()


class silent_listener:
    """A listener that accepts connections and sends nothing."""

    def __enter__(self) -> int:
        self._socket = socket.create_server((LOCALHOST, 0))
        port: int = self._socket.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._socket.close()
