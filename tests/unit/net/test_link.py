"""The Unix socket between agent and workers, with real sockets on both ends."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.net import messages
from elasticstate.net.link import MAX_DATAGRAM_BYTES, AgentSocket, ForkRequest, WorkerLink

W = WorkerId("h", 0, 1)
HELLO = messages.Hello(W, os.getpid(), messages.PROTOCOL_VERSION)
COMMITTED = messages.CommitSealed(CommitId(3, 16))


class Agent:
    """An agent's socket that records all messages."""

    def __init__(self, directory: Path, known: tuple[WorkerId, ...] = (W,)) -> None:
        self.received: list[tuple[WorkerId, object]] = []
        self.complaints: list[str] = []
        self.files: list[int] = []  # passed to a worker for its commit storage
        self.socket = AgentSocket(
            str(directory / "agent"),
            lambda worker: "" if worker in known else "is no worker of this agent",
            lambda worker, message: self.received.append((worker, message)),
            lambda worker, connection: connection.give(messages.Storage(b"key", False), self.files),
            self.complaints.append,
        )
        self.socket.open()

    async def until(self, condition: Callable[[], bool]) -> None:
        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        try:
            await asyncio.wait_for(look(), 60)
        except asyncio.TimeoutError:
            pytest.fail(f"received {self.received}, complained {self.complaints}")


def link_to(agent: Agent) -> WorkerLink:
    link = WorkerLink(agent.socket.path)
    link.connect()
    return link


def with_agent(directory: Path, scenario: Callable[[Agent], Awaitable[None]]) -> None:
    async def run() -> None:
        agent = Agent(directory)
        try:
            await scenario(agent)
        finally:
            agent.socket.close()

    asyncio.run(run())


def test_messages_of_a_worker_arrive_whole_and_in_order(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        link = link_to(agent)
        sent = [HELLO, COMMITTED, messages.Gate(3), messages.WorkerPreemptionNotice(15)]
        for message in sent:
            link.send(message)
        await agent.until(lambda: len(agent.received) == 4)
        assert agent.received == [(W, message) for message in sent]
        link.close()
        await agent.until(lambda: not agent.socket.is_connected(W))

    with_agent(tmp_path, scenario)


def test_a_worker_reads_without_blocking_and_sees_the_end_of_its_agent(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        link = link_to(agent)
        link.send(HELLO)
        await agent.until(lambda: agent.socket.is_connected(W))
        with pytest.raises(BlockingIOError):
            link.receive()
        agent.socket.send(W, messages.encode_to_worker(messages.Hold(4)))
        assert link.receive() == messages.Hold(4)
        agent.socket.close()
        assert link.receive() is None
        link.close()

    with_agent(tmp_path, scenario)


def test_sending_to_a_worker_that_does_not_read_never_blocks_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        link = link_to(agent)
        link.send(HELLO)
        await agent.until(lambda: agent.socket.is_connected(W))
        lasting = [messages.End(g, None, "x" * 10_000) for g in range(500)]  # far more than the socket holds
        for order in lasting:
            agent.socket.send(W, messages.encode_to_worker(order))
        got = []
        while len(got) < len(lasting):
            try:
                got.append(link.receive())
            except BlockingIOError:  # noqa: PERF203
                await asyncio.sleep(0)
        assert got == lasting
        link.close()

    with_agent(tmp_path, scenario)


@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        (COMMITTED, "its first message is not Hello"),
        (messages.Hello(WorkerId("h", 0, 2), 1, messages.PROTOCOL_VERSION), "is no worker of this agent"),
        (messages.Hello(W, 1, 99), f"it uses protocol 99, the agent protocol {messages.PROTOCOL_VERSION}"),
    ],
)
def test_who_does_not_introduce_itself_is_disconnected(
    tmp_path: Path, first: messages.FromWorkerBody, complaint: str
) -> None:
    async def scenario(agent: Agent) -> None:
        link = link_to(agent)
        link.send(first)
        await agent.until(lambda: bool(agent.complaints))
        assert complaint in agent.complaints[0]
        assert link.receive() is None
        assert agent.received == []
        link.close()

    with_agent(tmp_path, scenario)


def test_nobody_takes_the_place_of_a_connected_worker(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        link, other = link_to(agent), link_to(agent)
        link.send(HELLO)
        await agent.until(lambda: agent.socket.is_connected(W))
        other.send(HELLO)
        await agent.until(lambda: bool(agent.complaints))
        assert "which is connected" in agent.complaints[0]
        agent.socket.send(W, messages.encode_to_worker(messages.OpenGate(1)))
        assert link.receive() == messages.OpenGate(1)
        link.close()
        other.close()

    with_agent(tmp_path, scenario)


def test_rubbish_disconnects(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        raw.connect(agent.socket.path)
        raw.send(b"\xc1rubbish")
        await agent.until(lambda: bool(agent.complaints))
        assert raw.recv(10) == b""
        raw.close()

    with_agent(tmp_path, scenario)


def test_the_last_words_of_a_dead_worker_are_read(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        link = link_to(agent)
        link.send(HELLO)
        link.send(messages.Gate(1))
        link.close()
        agent.socket.drain(W)  # before the event loop has run: even the connection was not accepted yet
        assert agent.received == [(W, HELLO), (W, messages.Gate(1))]

    with_agent(tmp_path, scenario)


def test_a_traceback_that_is_too_long_is_cut_in_its_middle(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        link = link_to(agent)
        link.send(HELLO)
        link.send(messages.GenerationFailure(1, False, "begin" + "é" * MAX_DATAGRAM_BYTES + "end"))
        await agent.until(lambda: len(agent.received) == 2)
        report = agent.received[1][1]
        assert isinstance(report, messages.GenerationFailure)
        assert report.error.startswith("begin")
        assert report.error.endswith("end")
        assert "... cut ..." in report.error
        link.close()

    with_agent(tmp_path, scenario)


def test_a_worker_can_poll_its_link(tmp_path: Path) -> None:
    async def scenario(agent: Agent) -> None:
        link = link_to(agent)
        link.send(HELLO)
        await agent.until(lambda: agent.socket.is_connected(W))
        poller = select.poll()
        poller.register(link.fileno(), select.POLLIN)
        assert poller.poll(0) == []
        agent.socket.send(W, messages.encode_to_worker(messages.Leave(W)))
        assert [fd for fd, _ in poller.poll(1000)] == [link.fileno()]
        link.close()

    with_agent(tmp_path, scenario)


def test_a_request_for_a_worker_may_have_bytes_that_are_no_text() -> None:
    latin_1 = os.fsdecode("caf\xe9".encode("latin-1"))
    request = ForkRequest(("python", latin_1), f"/tmp/{latin_1}", {"PATH": "/bin", latin_1: f"\U0001f600{latin_1}"})
    assert ForkRequest.unpacked(request.packed()) == request
