"""gRPC between driver and agents, with a real server and real channels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from elasticstate.core.types import WorkerId
from elasticstate.net import messages
from elasticstate.net.rpc import AgentStream, ControlServer, DriverStream, ask_status

grpc.aio.init_grpc_aio()  # its thread lives as long as the process: it is here before the first test looks at threads

HELLO = messages.AgentHello("h", 1, messages.PROTOCOL_VERSION, "1")


class Driver:
    """A server, and what it has seen."""

    def __init__(self) -> None:
        self.streams: list[AgentStream] = []
        self.received: list[messages.FromAgent] = []
        self.lost: list[str] = []
        self.server = ControlServer(
            "secret",
            self.streams.append,
            lambda _, message: self.received.append(message),
            lambda _, reason: self.lost.append(reason),
            lambda: "all is well",
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        try:
            await asyncio.wait_for(look(), 5)
        except asyncio.TimeoutError:
            pytest.fail(f"streams {self.streams}, received {self.received}, lost {self.lost}")


def with_driver(scenario: Callable[[Driver, str], Awaitable[None]]) -> None:
    async def run() -> None:
        driver = Driver()
        address = await driver.server.start()
        try:
            await scenario(driver, address)
        finally:
            await driver.server.stop()

    asyncio.run(run())


def test_both_directions_are_first_in_first_out() -> None:
    async def scenario(driver: Driver, address: str) -> None:
        agent = DriverStream(address, "secret", HELLO)
        said = [messages.Started(WorkerId("h", slot, 1), slot) for slot in range(50)]
        for message in said:
            agent.send(message)
        await driver.until(lambda: len(driver.received) == 50)
        assert driver.received == said
        orders = [messages.Spawn(WorkerId("h", slot, 1)) for slot in range(50)]
        for order in orders:
            driver.streams[0].send(messages.encode(order))
        assert [await agent.receive() for _ in orders] == orders
        await agent.close()
        await driver.until(lambda: len(driver.lost) == 1)

    with_driver(scenario)


@pytest.mark.parametrize("token", ["", "wrong", "secret2"])
def test_an_agent_without_the_token_is_refused(token: str) -> None:
    async def scenario(driver: Driver, address: str) -> None:
        agent = DriverStream(address, token, HELLO)
        with pytest.raises(ConnectionError, match="UNAUTHENTICATED: the job's token is missing or wrong"):
            await agent.receive()
        await agent.close()
        assert driver.streams == []

    with_driver(scenario)


def test_every_method_asks_for_the_token() -> None:
    async def scenario(_: Driver, address: str) -> None:
        with pytest.raises(ConnectionError, match="UNAUTHENTICATED"):
            await ask_status(address, "wrong", 5)
        async with grpc.aio.insecure_channel(address) as channel:
            for method in ("Status", "Attach", "NoSuchMethod"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(f"/elasticstate.Control/{method}")(b"", timeout=5)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED

    with_driver(scenario)


def test_the_status_is_answered() -> None:
    async def scenario(_: Driver, address: str) -> None:
        assert await ask_status(address, "secret", 5) == "all is well"

    with_driver(scenario)


def test_another_protocol_is_refused_with_what_to_do() -> None:
    async def scenario(driver: Driver, address: str) -> None:
        agent = DriverStream(address, "secret", messages.AgentHello("h", 1, 99, "9.9"))
        with pytest.raises(ConnectionError, match=r"protocol 99 \(elasticstate 9.9\).*install the same version"):
            await agent.receive()
        await agent.close()
        assert driver.streams == []

    with_driver(scenario)


def test_the_first_message_must_be_a_hello() -> None:
    async def scenario(driver: Driver, address: str) -> None:
        agent = DriverStream(address, "secret", messages.AgentNotice())  # type: ignore[arg-type]
        with pytest.raises(ConnectionError, match="no hello"):
            await agent.receive()
        await agent.close()
        assert driver.streams == []

    with_driver(scenario)


def test_an_agent_learns_that_the_driver_is_gone() -> None:
    async def scenario(driver: Driver, address: str) -> None:
        agent = DriverStream(address, "secret", HELLO)
        await driver.until(lambda: len(driver.streams) == 1)
        await driver.server.stop()
        with pytest.raises(ConnectionError):
            await agent.receive()
        agent.send(messages.AgentNotice())
        await agent.flush()  # does not wait for ever
        await agent.close()
        assert len(driver.lost) == 1

    with_driver(scenario)


def test_a_message_beyond_the_limit_ends_the_stream() -> None:
    async def scenario(driver: Driver, address: str) -> None:
        agent = DriverStream(address, "secret", HELLO)
        await driver.until(lambda: len(driver.streams) == 1)
        agent.send(messages.Unresponsive(WorkerId("h", 0, 1), "x" * messages.MAX_MESSAGE_BYTES))
        await driver.until(lambda: len(driver.lost) == 1)
        assert driver.received == []
        await agent.close()

    with_driver(scenario)
