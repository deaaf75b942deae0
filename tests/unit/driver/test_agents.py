"""The driver's side of the agents, with real connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from elasticstate.core import types as t
from elasticstate.driver.agents import Agents
from elasticstate.net import messages
from elasticstate.net.control import DriverStream, Refused
from elasticstate.net.trust import Trust
from elasticstate.options import read_options
from tests.kit.agent import SPEC as FIRST_SPEC, TOKEN
from tests.kit.driver import votes

SPEC = structs.replace(FIRST_SPEC, epoch=2)


async def beat(driver: DriverStream) -> None:
    """Send what an agent that lives sends."""
    while True:
        driver.send(messages.Stamps(()))
        await asyncio.sleep(0.05)


def listening(tmp_path: Path, **options: float) -> messages.JobSpec:
    given = {"np": "1", "listen": "127.0.0.1", "token_file": str(tmp_path / "token")}
    texts = {name: f"{value:g}" for name, value in options.items()}
    return structs.replace(SPEC, options=read_options({**given, **texts}, ["true"], {}))


def test_an_agent_that_returns_at_another_address_waits_until_its_last_connection_counts_as_dead(
    tmp_path: Path,
) -> None:
    """A node that is lost sends no FIN: the connection of its agent seems to live for some time."""
    events: list[t.Event] = []
    received: list[tuple[str, messages.FromAgent]] = []

    async def scenario() -> None:
        spec = listening(tmp_path, heartbeat_timeout_s=1)
        agents = Agents(
            spec,
            TOKEN,
            tmp_path,
            events.append,
            lambda *each: received.append(each),
            str,
            print,
            lambda _: None,
            votes(),
        )
        agents.listen()

        async def dial(name: str, pid: int) -> DriverStream:
            driver = await DriverStream.dial((f"127.0.0.1:{agents.ports[0]}",), Trust(TOKEN), 60)
            driver.send(messages.AgentHello("pod-0", name, 1, 0, pid, messages.PROTOCOL_VERSION, "1"))
            return driver

        lost = await dial("lost", 77)
        assert await lost.receive() == spec
        lost.send(messages.HostReport((), ()))
        while not received:
            await asyncio.sleep(0.001)
        given_up = await dial("first try", 78)  # this try is given up
        returned = await dial("second try", 78)
        beating = asyncio.ensure_future(beat(returned))
        with pytest.raises(ConnectionError):
            await given_up.receive()
        assert agents.pid_of("pod-0") == 77
        assert await returned.receive() == spec
        assert agents.pid_of("pod-0") == 78
        returned.send(messages.HostReport((), ()))
        while len(received) < 2:
            await asyncio.sleep(0.001)
        again = await dial("lost", 77)  # the lost one returns, too late
        with pytest.raises(Refused, match="host pod-0 does not belong to this job, or has another agent"):
            await again.receive()
        beating.cancel()
        assert agents.pid_of("pod-0") == 78
        for each in (lost, given_up, returned, again):
            await each.close()
        hurry = asyncio.Event()
        hurry.set()
        await agents.stop("the end", hurry)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    reasons = [event.reason for event in events if isinstance(event, t.AgentLost)]
    assert reasons[0] == "sent no heartbeat for --heartbeat-timeout of 1 s"


def test_discovery_drains_the_agents_that_have_dialled_in(tmp_path: Path) -> None:
    """An agent may dial in before discovery names its host."""

    async def scenario() -> None:
        agents = Agents(
            listening(tmp_path), TOKEN, tmp_path, lambda _: None, lambda *_: None, str, print, lambda _: 0, votes()
        )
        agents.listen()
        drivers = []
        for name in ("a", "b", "c"):
            driver = await DriverStream.dial((f"127.0.0.1:{agents.ports[0]}",), Trust(TOKEN), 60)
            rack = {"a": "r1", "b": "no rack!"}.get(name, "")
            driver.send(messages.AgentHello(name, name, 2, 0, 7, messages.PROTOCOL_VERSION, "1", rack))
            await driver.receive()
            drivers.append(driver)

        def discovered(*hosts: tuple[str, int]) -> dict[str, int]:
            agents.discovered([t.HostSlots(*host, rack="r2") for host in hosts])
            (event,) = agents.news()
            assert isinstance(event, t.HostsDiscovered)
            racks = {host.name: host.rack for host in event.hosts}
            named = {name for name, _ in hosts}
            assert racks == {name: "r1" if name == "a" else "r2" if name in named else "" for name in "abc"}
            return {host.name: host.slots for host in event.hosts}

        assert agents.refuse("a") == "", "this driver starts no agent"
        assert discovered() == {"a": 2, "b": 2, "c": 2}
        assert discovered(("a", 1), ("b", 1)) == {"a": 2, "b": 2, "c": 2}, "c has not been named yet"
        assert discovered(("a", 0), ("c", 1)) == {"a": 0, "b": 0, "c": 2}, "a leaves, and b is gone"
        assert discovered(("a", 1), ("b", 1), ("c", 1)) == {"a": 2, "b": 2, "c": 2}
        for driver in drivers:
            await driver.close()
        hurry = asyncio.Event()
        hurry.set()
        await agents.stop("the end", hurry)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_where_an_agent_has_dialled_in_again_no_other_one_is_started(tmp_path: Path) -> None:
    """The messages of the agent may be late or delayed, so the core does not know the agent yet."""
    events: list[t.Event] = []
    received: list[tuple[str, messages.FromAgent]] = []

    def fail(text: str) -> None:
        raise AssertionError(text)

    async def scenario() -> None:
        agents = Agents(
            SPEC, TOKEN, tmp_path, events.append, lambda *each: received.append(each), str, fail, print, votes()
        )
        agents.listen()
        driver = await DriverStream.dial((f"127.0.0.1:{agents.ports[0]}",), Trust(TOKEN), 60)
        driver.send(messages.AgentHello("far", "id", 0, 1, 77, messages.PROTOCOL_VERSION, "1"))
        assert await driver.receive() == SPEC
        agents.start("far")
        assert agents.pid_of("far") == 77
        driver.send(messages.HostReport((), ()))
        while not received:
            await asyncio.sleep(0.001)
        assert received == [("far", messages.HostReport((), ()))]
        await driver.close()
        while not events:
            await asyncio.sleep(0.001)
        hurry = asyncio.Event()
        hurry.set()
        await agents.stop("the end", hurry)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [type(event) for event in events] == [t.AgentLost]


def test_an_agent_of_the_previous_driver_is_preferred_to_a_new_one_that_waits_for_its_end(tmp_path: Path) -> None:
    """The earlier agent has workers that train, and commits. The new one has not locked the host yet."""
    received: list[tuple[str, messages.FromAgent]] = []

    async def scenario() -> None:
        options = read_options({"np": "1", "listen": "127.0.0.1", "token_file": str(tmp_path / "token")}, ["true"], {})
        spec = structs.replace(SPEC, options=options)
        agents = Agents(
            spec,
            TOKEN,
            tmp_path,
            lambda _: None,
            lambda *each: received.append(each),
            str,
            print,
            lambda _: None,
            votes(),
        )
        agents.listen()

        async def dial(name: str, epoch: int, pid: int) -> DriverStream:
            driver = await DriverStream.dial((f"127.0.0.1:{agents.ports[0]}",), Trust(TOKEN), 60)
            driver.send(messages.AgentHello("far", name, 1, epoch, pid, messages.PROTOCOL_VERSION, "1"))
            return driver

        new = await dial("new", 0, 78)
        assert await new.receive() == spec
        earlier = await dial("earlier", 1, 77)
        assert await earlier.receive() == spec
        with pytest.raises(Refused, match="the previous agent of host far has connected again") as refused:
            await new.receive()
        assert not refused.value.is_stopped
        earlier.send(messages.HostReport((), ()))
        while not received:
            await asyncio.sleep(0.001)
        late = await dial("another", 1, 79)
        beating = asyncio.ensure_future(beat(earlier))
        with pytest.raises(Refused, match="host far does not belong to this job, or has another agent") as refused:
            await late.receive()
        beating.cancel()
        assert not refused.value.is_stopped, "its commits must stay for the agent of the host"
        assert agents.pid_of("far") == 77
        for each in (new, earlier, late):
            await each.close()
        hurry = asyncio.Event()
        hurry.set()
        await agents.stop("the end", hurry)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_agent_that_was_lost_while_it_stopped_learns_that_its_commits_are_not_needed(tmp_path: Path) -> None:
    events: list[t.Event] = []

    async def scenario() -> None:
        agents = Agents(SPEC, TOKEN, tmp_path, events.append, lambda *_: None, str, print, lambda _: None, votes())
        agents.listen()

        async def dial(epoch: int) -> DriverStream:
            driver = await DriverStream.dial((f"127.0.0.1:{agents.ports[0]}",), Trust(TOKEN), 60)
            driver.send(messages.AgentHello("far", "id", 0, epoch, 77, messages.PROTOCOL_VERSION, "1"))
            return driver

        first = await dial(1)
        assert await first.receive() == SPEC
        agents.stop_host("far", "discovery removed host far")
        await first.close()
        while not events:
            await asyncio.sleep(0.001)
        second = await dial(2)
        with pytest.raises(Refused) as refused:
            await second.receive()
        assert refused.value.is_stopped
        await second.close()
        hurry = asyncio.Event()
        hurry.set()
        await agents.stop("the end", hurry)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [type(event) for event in events] == [t.AgentLost]


@pytest.mark.parametrize("name", ["\x1b[31mred", "../../etc", "", "a\nelasticrun: b"])
def test_an_agent_whose_name_is_no_host_name_is_refused(tmp_path: Path, name: str) -> None:
    """The name would appear in paths and on the terminal."""
    warnings: list[str] = []

    async def scenario() -> None:
        options = read_options({"np": "1", "listen": "127.0.0.1", "token_file": str(tmp_path / "token")}, ["true"], {})
        spec = structs.replace(SPEC, options=options)
        agents = Agents(spec, TOKEN, tmp_path, lambda _: None, lambda *_: None, str, warnings.append, print, votes())
        agents.listen()
        driver = await DriverStream.dial((f"127.0.0.1:{agents.ports[0]}",), Trust(TOKEN), 60)
        driver.send(messages.AgentHello(name, "id", 1, 0, 77, messages.PROTOCOL_VERSION, "1"))
        with pytest.raises(ConnectionRefusedError, match="the agent's host name is invalid"):
            await driver.receive()
        await driver.close()
        assert agents.pid_of(name) is None
        hurry = asyncio.Event()
        hurry.set()
        await agents.stop("the end", hurry)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(warnings) == 1
