"""Strangers on the port of a job that trains: it goes on undisturbed, and says who was refused, and why."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from job import Job

from elasticstate.net import codec, messages
from elasticstate.net.stream import dial
from elasticstate.net.trust import NAME, Trust

CROWD = 10_000


class Door(NamedTuple):
    """Where the driver listens, and what opens."""

    host: str
    port: int
    token: str

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)


@contextmanager
def job_that_trains(tmp_path: Path) -> Iterator[tuple[Job, Door]]:
    options = ("-np", "2", "--connect-timeout", "1")
    with Job(tmp_path, *options, until=tmp_path / "stop", steps=10) as job:
        job.wait_for_step(3)
        record = json.loads(next(Path(os.environ["XDG_RUNTIME_DIR"]).glob("*/driver.json")).read_text())
        yield job, Door("127.0.0.1", record["ports"][0], record["token"])
        steps = len(job.log("commit"))
        job.wait_for("20 more commits", lambda: len(job.log("commit")) > steps + 20)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        assert len(job.events("world_formed")) == 1
        assert not job.events("agent_lost")


def refusals(job: Job, words: str) -> list[str]:
    return [e["text"] for e in job.events("warning") if "refused a connection from" in e["text"] and words in e["text"]]


def test_random_bytes_and_half_open_tls(tmp_path: Path) -> None:
    with job_that_trains(tmp_path) as (job, door), ExitStack() as stack:
        rubbish = stack.enter_context(door.connect())
        rubbish.sendall(b"rubbish " + os.urandom(4096))  # never the beginning of a ClientHello
        half = stack.enter_context(door.connect())
        half.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
        job.wait_for("the refusal of random bytes", lambda: refusals(job, "speaks no TLS"))
        job.wait_for("the refusal of half a handshake", lambda: refusals(job, "in time"))


def test_wrong_tokens_and_certificates(tmp_path: Path) -> None:
    async def knock(door: Door, context: ssl.SSLContext) -> None:
        stream, queue = await dial(f"{door.host}:{door.port}", context, NAME, 10)
        stream.send(codec.encode(messages.AgentHello("localhost", "x", 0, 0, 1, messages.PROTOCOL_VERSION, "1")))
        with pytest.raises(ConnectionError):
            await queue.get()

    async def greet(door: Door, context: ssl.SSLContext) -> str:
        """It has the token, but is no agent of a host of this job."""
        stream, queue = await dial(f"{door.host}:{door.port}", context, NAME, 10)
        stream.send(codec.encode(messages.AgentHello("localhost", "x", 0, 0, 1, messages.PROTOCOL_VERSION, "1")))
        answer = codec.decode_to_agent(await queue.get())
        assert isinstance(answer, messages.Refusal)
        stream.close()
        await stream.closed()
        return answer.reason

    with job_that_trains(tmp_path) as (job, door):
        other = Trust("o" * 32).client
        other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
        asyncio.run(knock(door, other))
        job.wait_for("the refusal of another token", lambda: refusals(job, "it has another token"))
        right = Trust(door.token).client  # but no certificate is shown
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        asyncio.run(knock(door, bare))
        job.wait_for("the refusal of no certificate", lambda: refusals(job, "no certificate"))
        assert "no host of this job, or has another agent" in asyncio.run(greet(door, right))


def test_messages_that_say_they_are_large(tmp_path: Path) -> None:
    async def knock(door: Door) -> None:
        reader, writer = await asyncio.open_connection(
            door.host, door.port, ssl=Trust(door.token).client, server_hostname=NAME
        )
        writer.write(struct.pack("!I", 1 << 30) + b"x" * 1000)
        assert await reader.read() == b""
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    with job_that_trains(tmp_path) as (job, door):
        asyncio.run(knock(door))
        job.wait_for("the refusal of a gigabyte", lambda: refusals(job, "of 1073741824 bytes is larger than"))


def test_ten_thousand_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    with job_that_trains(tmp_path) as (job, door), ExitStack() as stack:
        for _ in range(CROWD):
            stack.enter_context(door.connect())
        job.wait_for("their refusal", lambda: refusals(job, "too many others"))
        status = asyncio.run(_ask(door))
        assert "rank 1" in status


async def _ask(door: Door) -> str:
    stream, queue = await dial(f"{door.host}:{door.port}", Trust(door.token).client, NAME, 30)
    stream.send(codec.encode(messages.AskStatus()))
    text = (await queue.get()).decode()
    stream.close()
    await stream.closed()
    return text
