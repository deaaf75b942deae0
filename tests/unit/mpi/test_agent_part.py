"""A real agent that passes the MPI identities on to its workers, and connects them to the driver's host."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from elasticstate.mpi.broker import Relay
from elasticstate.mpi.driver_part import Identity
from elasticstate.net import messages
from elasticstate.net.messages import BackendOrder
from elasticstate.net.names import port_of
from elasticstate.net.trust import Trust
from tests.kit.agent import TOKEN, Scene, play

SERVER = (("PMIX_SERVER_URI41", "job@0.0;tcp4://127.0.0.1:4711"), ("PMIX_RANK", "3"))
SOON_S = 30.0


async def read(path: Path) -> dict[str, str]:
    async def written() -> dict[str, str]:
        while not path.exists():
            await asyncio.sleep(0.001)
        found: dict[str, str] = json.loads(path.read_text())
        return found

    return await asyncio.wait_for(written(), SOON_S)


def order(identity: Identity) -> BackendOrder:
    return BackendOrder(messages.encode(identity))


async def begin(scene: Scene) -> None:
    await scene.start()
    await scene.serve("unused", backend="mpi")


async def end(scene: Scene) -> None:
    scene.send(messages.Shutdown("done"))
    assert (await scene.end())[0] == 0


def test_on_the_drivers_host_the_agent_writes_the_identity_unchanged(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        scene.send(order(Identity(str(tmp_path / "identity"), SERVER)))
        assert await read(tmp_path / "identity") == dict(SERVER)
        await end(scene)

    play(tmp_path, scenario)


def test_on_another_host_the_agent_connects_workers_to_the_relay(tmp_path: Path) -> None:
    """Two workers share one tunnel. Data in the shared memory of the driver's host reaches them in messages."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await writer.drain()
        writer.close()

    async def scenario(scene: Scene) -> None:
        await begin(scene)
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        relay = Relay(port_of(server.sockets[0]))
        relay_port = await relay.open(Trust(TOKEN), SOON_S)
        written = []
        for name in ("first", "second"):
            scene.send(order(Identity(str(tmp_path / name), SERVER, relay_port)))
            written.append(await read(tmp_path / name))
        assert written[0] == written[1]
        uri, _, port = written[0].pop("PMIX_SERVER_URI41").rpartition(":")
        assert uri == "job@0.0;tcp4://127.0.0.1"
        assert written[0] == {"PMIX_RANK": "3", "PMIX_MCA_gds": "hash"}
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.read(), SOON_S) == b"hello"
        writer.close()
        await writer.wait_closed()
        relay.server.close()
        server.close()
        await end(scene)

    play(tmp_path, scenario)


def test_an_unreachable_relay_is_a_warning_at_the_driver(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        closed = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = port_of(closed.sockets[0])
        closed.close()
        await closed.wait_closed()
        scene.send(order(Identity(str(tmp_path / "identity"), SERVER, port)))
        warning = await scene.hear(messages.AgentWarning)
        assert warning.text.startswith(f"a worker received no identity for MPI: 127.0.0.1:{port}: ")
        assert not (tmp_path / "identity").exists()
        await end(scene)

    play(tmp_path, scenario)


def test_a_malformed_order_is_a_warning_at_the_driver(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        scene.send(messages.BackendOrder(b"\xff"))
        warning = await scene.hear(messages.AgentWarning)
        assert warning.text.startswith("a worker received no identity for MPI: ")
        await end(scene)

    play(tmp_path, scenario)
