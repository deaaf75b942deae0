"""A real agent that passes the MPI identities on to its workers, and connects them to the driver's host."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from elasticstate.net import messages
from elasticstate.net.relay import Relay, port_of
from elasticstate.net.trust import Trust
from tests.unit.agent.scene import TOKEN, Scene, play

SERVER = (("PMIX_SERVER_URI41", "job@0.0;tcp4://127.0.0.1:4711"), ("PMIX_RANK", "3"))
SOON_S = 30.0


async def read(path: Path) -> dict[str, str]:
    async def written() -> dict[str, str]:
        while not path.exists():
            await asyncio.sleep(0.001)
        found: dict[str, str] = json.loads(path.read_text())
        return found

    return await asyncio.wait_for(written(), SOON_S)


async def ends(scene: Scene) -> None:
    scene.send(messages.Shutdown("done"))
    assert (await scene.end())[0] == 0


def test_on_the_drivers_host_an_identity_is_handed_on_as_it_is(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("unused")
        scene.send(messages.Identity(str(tmp_path / "identity"), SERVER))
        assert await read(tmp_path / "identity") == dict(SERVER)
        await ends(scene)

    play(tmp_path, scenario)


def test_on_another_host_the_agent_leads_to_the_relay(tmp_path: Path) -> None:
    """Two workers share one tunnel. Data in the shared memory of the driver's host reaches them in messages."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await writer.drain()
        writer.close()

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("unused")
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        relay = Relay(port_of(server))
        relay_port = await relay.open(Trust(TOKEN), SOON_S)
        told = []
        for name in ("first", "second"):
            scene.send(messages.Identity(str(tmp_path / name), SERVER, relay_port))
            told.append(await read(tmp_path / name))
        assert told[0] == told[1]
        uri, _, port = told[0].pop("PMIX_SERVER_URI41").rpartition(":")
        assert uri == "job@0.0;tcp4://127.0.0.1"
        assert told[0] == {"PMIX_RANK": "3", "PMIX_MCA_gds": "hash"}
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.read(), SOON_S) == b"hello"
        writer.close()
        await writer.wait_closed()
        relay.close()
        server.close()
        await ends(scene)

    play(tmp_path, scenario)


def test_without_a_way_to_mpirun_people_are_told(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("unused")
        closed = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = port_of(closed)
        closed.close()
        await closed.wait_closed()
        scene.send(messages.Identity(str(tmp_path / "identity"), SERVER, port))
        warning = await scene.hear(messages.AgentWarning)
        assert warning.text == f"a worker gets no identity for MPI: 127.0.0.1:{port}: nobody listens there"
        assert not (tmp_path / "identity").exists()
        await ends(scene)

    play(tmp_path, scenario)
