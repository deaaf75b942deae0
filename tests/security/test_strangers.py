"""Strangers on the port of a job that trains: it continues undisturbed, and reports each refused peer and the reason.

One job for all of them. The gaps between its ticks during an attack are compared with those before, in the same run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import ssl
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

from elasticstate.net import messages, trust
from elasticstate.net.control import ask_status, dial
from elasticstate.net.trust import MAX_UNAUTHENTICATED, NAME, Trust
from tests.kit.job import Job
from tests.kit.strangers import (
    Attacker,
    client_hello,
    connect,
    garbage,
    handshakes_without_a_certificate,
    idle,
    slow_clients,
)

IN_PROCESSES = 4
SLOW, SLOW_SECONDS = 500, 3.0
GARBAGE_BYTES = 1 << 30
IDLE = 10_000
QUIET_TICKS = 100
MOST_TAKEN_BYTES = MAX_UNAUTHENTICATED * 80_000 + 50_000_000  # each connection takes 70 kB
HELLO = messages.AgentHello("localhost", "x", 0, 0, 1, messages.PROTOCOL_VERSION, "1")


class Door(NamedTuple):
    """The address of the driver, and the token."""

    host: str
    port: int
    token: str

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@contextmanager
def job_that_trains(tmp_path: Path) -> Iterator[tuple[Job, Door]]:
    options = ("-np", "2", "--heartbeat-timeout", "1")
    with Job(tmp_path, *options, until=tmp_path / "stop", steps=10, step_seconds=0.03) as job:
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


def ticks(job: Job) -> list[float]:
    """Return the times at which rank 0 committed."""
    return [commit["time"] for commit in job.log("commit") if commit["rank"] == 0]


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def most_used_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has ended")


class Watch:
    """Comparison of the ticks of a job, and of the memory of its driver, with the values before."""

    def __init__(self, job: Job) -> None:
        self._job = job
        job.wait_for("quiet ticks", lambda: len(ticks(job)) > QUIET_TICKS)
        self._usual = gaps(ticks(job)[-QUIET_TICKS:])
        self._used_bytes = most_used_bytes(job.process.pid)

    @contextmanager
    def during(self, attack: str) -> Iterator[None]:
        begin = time.time()
        yield
        end = time.time()
        found = gaps([tick for tick in ticks(self._job) if begin <= tick <= end])
        assert len(found) > 10, f"{attack}: {len(found)} ticks in {end - begin:.1f} s"
        taken = most_used_bytes(self._job.process.pid) - self._used_bytes
        usual, now = ([1e3 * statistics.quantiles(each, n=10)[i] for i in (4, 8)] for each in (self._usual, found))
        said = (
            f"{attack}: {end - begin:.1f} s, ticks every {now[0]:.1f} ms (a tenth: more than {now[1]:.1f}), before "
            f"every {usual[0]:.1f} ms ({usual[1]:.1f}); the driver has taken {taken / 1e6:.0f} MB"
        )
        print(said)
        assert now[0] < 2 * usual[0], said
        assert now[1] < 2 * usual[1], said
        assert taken < MOST_TAKEN_BYTES, said


def refusals(job: Job, words: str) -> list[str]:
    return [e["text"] for e in job.events("warning") if "refused a connection from" in e["text"] and words in e["text"]]


@pytest.mark.parametrize("handshakes", [1_000, pytest.param(12_000, marks=pytest.mark.long)])
def test_strangers_disturb_no_tick_and_take_a_bounded_memory(tmp_path: Path, handshakes: int) -> None:
    with job_that_trains(tmp_path) as (job, door):
        watch = Watch(job)
        with watch.during("handshakes, slow clients, garbage and false proofs at once"), ExitStack() as stack:
            flood = [
                stack.enter_context(Attacker(attack, door.host, door.port))
                for attack in (
                    *[handshakes_without_a_certificate(handshakes // IN_PROCESSES)] * IN_PROCESSES,
                    slow_clients(SLOW, SLOW_SECONDS),
                    garbage(GARBAGE_BYTES),
                )
            ]
            for refused in FALSE_PROOFS:
                refused(job, door)
            status = asyncio.run(ask_status(door.address, door.token, 60))
            assert "rank 1" in status
            *made, bytes_of_slow_clients, bytes_of_garbage = [attack.count() for attack in flood]
        assert sum(made) == handshakes
        assert bytes_of_slow_clients >= 10 * SLOW
        assert bytes_of_garbage >= GARBAGE_BYTES
        reported = 1 << (handshakes.bit_length() - 1)  # the last power of two
        no_certificate = f"the peer has sent no certificate ({reported} times so far)"
        job.wait_for("refusals of handshakes", lambda: refusals(job, no_certificate))
        job.wait_for("refusals of slow clients", lambda: refusals(job, "timed out"))

        with watch.during("idle connections"), Attacker(idle(IDLE), door.host, door.port) as crowd:
            assert crowd.count() == IDLE
            # On a busy machine they come so slowly that each is refused by its time before there are too many.
            by_time = "timed out: the peer did not authenticate (8192 times so far)"
            by_number = "too many unauthenticated connections"
            job.wait_for("refusals of a crowd", lambda: refusals(job, by_number) or refusals(job, by_time))
            assert "rank 1" in asyncio.run(ask_status(door.address, door.token, 60))


# ------------------------------------------------------------------------------------------------------ false proofs


async def knock(door: Door, context: ssl.SSLContext) -> None:
    stream = await dial(door.address, context, NAME, 60)
    stream.send(HELLO)
    with pytest.raises(ConnectionError):
        await stream.get()


def credulous(trusting: Trust) -> ssl.SSLContext:
    """Return the TLS context of a client that does not verify the driver's certificate."""
    trusting.client.check_hostname, trusting.client.verify_mode = False, ssl.CERT_NONE
    return trusting.client


def random_bytes(job: Job, door: Door) -> None:
    with connect(door.host, door.port) as stranger:
        stranger.sendall(b"rubbish " + os.urandom(4096))  # never the start of a ClientHello
        job.wait_for("the refusal of random bytes", lambda: refusals(job, "the peer does not belong to this job"))


def half_a_handshake(job: Job, door: Door) -> None:
    with connect(door.host, door.port) as stranger:
        stranger.sendall(client_hello()[:100])
        job.wait_for("the refusal of half a handshake", lambda: refusals(job, "timed out"))


def another_token(job: Job, door: Door) -> None:
    """Authenticate with the token of another job. The token of an ended job fails in the same way."""
    asyncio.run(knock(door, credulous(Trust("o" * 32))))
    job.wait_for("the refusal of another token", lambda: refusals(job, "it has another token"))


def an_expired_certificate(job: Job, door: Door) -> None:
    """Authenticate with a certificate that the job's token has signed, but that has expired."""
    before = len(refusals(job, "the peer has the token of another job"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "_UNTIL", datetime(2001, 1, 1, tzinfo=timezone.utc))
        expired = Trust(door.token)
    asyncio.run(knock(door, credulous(expired)))
    job.wait_for("its refusal", lambda: len(refusals(job, "the peer has the token of another job")) > before)


def a_replayed_conversation(job: Job, door: Door) -> None:
    """Send all bytes again that a client with the token has sent."""
    recorded = asyncio.run(record(door))
    assert len(recorded) > 1000
    with connect(door.host, door.port) as stranger:
        stranger.sendall(recorded)
        with suppress(ConnectionResetError):
            while answer := stranger.recv(1 << 16):
                assert b"rank 1" not in answer, "it is encrypted, if it is anything"
    job.wait_for("its refusal", lambda: refusals(job, "the peer does not belong to this job"))


async def record(door: Door) -> bytes:
    recorded = bytearray()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(door.host, door.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, kept: bytearray) -> None:
            while data := await source.read(65536):
                kept += data
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, back, recorded), pump(there, writer, bytearray()))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert "rank 1" in await ask_status(f"127.0.0.1:{port}", door.token, 60)
    server.close()
    return bytes(recorded)


def a_resumed_session(_: Job, door: Door) -> None:
    """Try to resume the TLS session of an authenticated client. The driver issues no tickets, so this must fail."""
    context = Trust(door.token).client
    ask = messages.encode(messages.AskStatus())
    with context.wrap_socket(connect(door.host, door.port), server_hostname=NAME) as first:
        first.sendall(struct.pack("!I", len(ask)) + ask)
        assert first.recv(1 << 16)  # a ticket would have come first
        session = first.session
        assert session is not None
        assert not session.has_ticket
    with context.wrap_socket(connect(door.host, door.port), server_hostname=NAME, session=session) as second:
        assert not second.session_reused


def an_agent_of_no_host(_: Job, door: Door) -> None:
    async def greet() -> str:
        """Dial with the right token, but as an agent of no host of this job."""
        stream = await dial(door.address, Trust(door.token).client, NAME, 60)
        stream.send(HELLO)
        answer = messages.decode_to_agent(await stream.get())
        assert isinstance(answer, messages.Refusal)
        await stream.close()
        return answer.reason

    assert "does not belong to this job, or has another agent" in asyncio.run(greet())


def a_message_that_says_it_is_large(job: Job, door: Door) -> None:
    context = Trust(door.token).client
    with context.wrap_socket(connect(door.host, door.port), server_hostname=NAME) as stream:
        stream.sendall(struct.pack("!I", 1 << 30) + b"x" * 1000)
        with suppress(OSError):
            assert stream.recv(1) == b""
    job.wait_for("the refusal of a gigabyte", lambda: refusals(job, "received a message of 1073741824 bytes"))


FALSE_PROOFS = (
    random_bytes,
    half_a_handshake,
    another_token,
    an_expired_certificate,
    a_replayed_conversation,
    a_resumed_session,
    an_agent_of_no_host,
    a_message_that_says_it_is_large,
)
