"""The port of a copy server: strangers get a nonce, and cost a socket for a limited time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from elasticstate.core.ids import CommitId
from elasticstate.core.types import CopyOf
from elasticstate.errors import CopyError
from elasticstate.replicas import wire
from elasticstate.replicas.client import ReplicaClient
from elasticstate.replicas.replica_server import MAX_UNAUTHENTICATED
from tests.kit.commits import KEY, Host

C1 = CommitId(1, 1)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def host(stack: ExitStack, tmp_path: Path) -> Host:
    return stack.enter_context(Host("a", tmp_path))


def connect(stack: ExitStack, host: Host) -> socket.socket:
    ip, port = host.address.split(":")
    found = stack.enter_context(socket.create_connection((ip, int(port)), 30))
    found.settimeout(30)
    return found


def received(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(4096):
            data += part
    return data


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(200), wire.MAGIC + bytes(64)])
def test_a_stranger_gets_a_nonce_and_nothing_else(stack: ExitStack, host: Host, data: bytes) -> None:
    connection = connect(stack, host)
    connection.sendall(data)
    assert len(received(connection)) <= wire.GREETING_BYTES
    assert len(host.log) == 1


def test_a_silent_stranger_is_closed_after_the_time_out(stack: ExitStack, tmp_path: Path) -> None:
    host = stack.enter_context(Host("a", tmp_path, timeout_s=0.1))
    assert len(received(connect(stack, host))) == wire.GREETING_BYTES
    assert "has not authenticated in time" in host.log[0]


def test_a_proof_is_of_no_use_on_another_connection(stack: ExitStack, host: Host) -> None:
    first, second = connect(stack, host), connect(stack, host)
    nonces = [wire._exactly(one, wire.GREETING_BYTES)[len(wire.MAGIC) :] for one in (first, second)]
    own = os.urandom(wire.NONCE_BYTES)
    answer = wire.MAGIC + own + wire.proof(KEY, b"client", nonces[0], own)
    second.sendall(answer)
    assert received(second) == b""
    first.sendall(answer)
    assert len(wire._exactly(first, wire.PROOF_BYTES)) == wire.PROOF_BYTES


def test_silent_strangers_do_not_lock_out_the_job(stack: ExitStack, host: Host) -> None:
    worker = host.worker()
    data = worker.commit(C1, b"x" * 1000)
    strangers = [connect(stack, host) for _ in range(MAX_UNAUTHENTICATED + 20)]
    client = stack.enter_context(closing(ReplicaClient({"a": host.address}, KEY, 30.0)))
    assert client.read(CopyOf("a", worker.slot, C1), 0, 100) == data[:100]
    assert [len(received(stranger)) for stranger in strangers[:20]] == [wire.GREETING_BYTES] * 20, "the oldest"
    assert any("too many others" in line for line in host.log)
    assert len(host.log) < 10, "a flood does not fill the log"


def test_a_server_that_does_not_have_the_key_gets_no_request(stack: ExitStack) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(ReplicaClient({"a": address(listener)}, KEY, 30.0)) as client,
    ):
        pid = os.fork()
        if not pid:
            connection, _ = listener.accept()
            connection.sendall(wire.MAGIC + bytes(wire.NONCE_BYTES))
            answer = wire._exactly(connection, wire.ANSWER_BYTES)
            connection.sendall(answer[-wire.PROOF_BYTES :])  # the client's own proof, reflected
            os._exit(len(connection.recv(100)))
        with pytest.raises(CopyError, match="does not belong to this job"):
            client.header(CopyOf("a", Host.slot_of("a"), C1))
        assert os.waitpid(pid, 0)[1] == 0, "the client sent something after the wrong proof"


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("change", ["length", "body", "tag"])
def test_a_frame_that_is_changed_ends_the_connection(stack: ExitStack, host: Host, change: str) -> None:
    worker = host.worker()
    worker.commit(C1, b"x" * 1000)
    connection = wire.dial(host.address, KEY, 30.0, lambda _: None)
    stack.callback(connection.close)
    frames: list[bytes] = []
    connection.send_bytes = lambda data, begin, end: frames.append(bytes(data[begin:end]))  # type: ignore[assignment]
    connection.send(wire.OpenReplica(worker.slot, C1))
    frame = bytearray(frames[0])
    at = {"length": 3, "body": 10, "tag": len(frame) - 1}[change]
    frame[at] ^= 0xFF
    connection.socket.sendall(frame)
    assert received(connection.socket) == b""
