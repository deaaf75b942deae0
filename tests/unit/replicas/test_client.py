"""Reading of copies: a server and a client in one process, with real sockets and files."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import CopyOf
from elasticstate.errors import CollectiveError, CopyError
from elasticstate.replicas import replica_server
from elasticstate.replicas.client import ReplicaClient
from tests.kit.commits import KEY, Host, Worker, wait_until
from tests.kit.proxy import Proxy, flip_once

C1, C2, C3 = CommitId(1, 1), CommitId(1, 2), CommitId(1, 3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def host(stack: ExitStack, tmp_path: Path) -> Host:
    return stack.enter_context(Host("a", tmp_path))


@pytest.fixture
def client(stack: ExitStack, host: Host) -> ReplicaClient:
    return stack.enter_context(closing(ReplicaClient({"a": host.address}, KEY, 10.0)))


def copy_of(worker: Worker, commit: CommitId, host: str = "a") -> CopyOf:
    return CopyOf(host, worker.slot, commit)


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def read(client: ReplicaClient, copy: CopyOf, offset: int, length: int) -> bytes:
    data = bytearray(length)
    client.read_into(copy, [(offset, memoryview(data))])
    return bytes(data)


@pytest.mark.parametrize("size", [10, 3 << 20, 70 << 20])
def test_a_commit_in_a_buffer_is_read_by_its_ranges(host: Host, client: ReplicaClient, size: int) -> None:
    worker = host.worker()
    data = worker.commit(C1, os.urandom(size))
    copy = copy_of(worker, C1)
    assert client.header(copy) == data[:4096]
    assert client.sealed(copy).length == len(data)
    assert read(client, copy, 0, len(data)) == data
    assert client.read(copy, 5, 1000) == data[5:1005]
    first, second = bytearray(size), bytearray(7)
    client.read_into(copy, [(4160, memoryview(first)), (3, memoryview(second)), (0, memoryview(b""))])
    assert (first, second) == (data[4160 : 4160 + size], data[3:10])


def test_an_absent_commit_and_ranges_beyond_its_end_are_errors(host: Host, client: ReplicaClient) -> None:
    worker = host.worker()
    data = worker.commit(C1, b"x" * 1000)
    with pytest.raises(CopyError, match=r"commit \(1, 2\) of slot a:0 on host a cannot be read: host a has no commit"):
        client.header(copy_of(worker, C2))
    for offset in (len(data) - 5, 1 << 40):
        with pytest.raises(CopyError, match=f"has {len(data)} bytes, not 10 at {offset}"):
            read(client, copy_of(worker, C1), offset, 10)
    with pytest.raises(CopyError, match="host b has no copy server"):
        client.header(copy_of(worker, C1, "b"))
    assert read(client, copy_of(worker, C1), 0, len(data)) == data, "the connection serves on after a refusal"


def test_a_commit_under_a_new_id_is_still_read(host: Host, client: ReplicaClient) -> None:
    worker = host.worker()
    data = worker.commit(C1, b"x" * 1000)
    source = host.copies.open(worker.slot, C1)
    worker.page.seal(0, worker.owner, *C2, *source.sealed.content, source.sealed.tag)
    source.check_unchanged()
    source.close()
    assert client.sealed(copy_of(worker, C2)).length == len(data)
    with pytest.raises(CopyError, match="no commit"):
        client.header(copy_of(worker, C1))


def test_a_damaged_buffer_is_not_served(host: Host, client: ReplicaClient) -> None:
    worker = host.worker()
    worker.commit(C1, b"x" * 1000)
    os.pwrite(worker.buffers[0], b"y", 4200)
    for size in (10, 4096):
        with pytest.raises(CopyError, match="is damaged"):
            read(client, copy_of(worker, C1), 0, size)
        assert host.report() == ("damaged", worker.slot, C1), "the driver must name other copies"
    with pytest.raises(CopyError, match="is damaged"):
        client.header(copy_of(worker, C1))


@pytest.mark.parametrize("at", [20, 4200, 60_000], ids=["header", "tensors", "not requested"])
def test_a_kept_copy_that_is_damaged_later_is_dropped_and_the_buffer_is_read(
    host: Host, client: ReplicaClient, at: int
) -> None:
    worker = host.worker()
    data = worker.commit(C1, os.urandom(100_000))
    host.copies.replicate(C1, {0: []})
    assert host.report() == ("kept", worker.slot, C1)
    flip(host.kept_file(), at)
    assert client.header(copy_of(worker, C1)) == data[:4096]
    assert read(client, copy_of(worker, C1), 0, 5000) == data[:5000]
    assert host.report() == ("dropped", worker.slot, C1)
    assert host.reasons == [("a", "it is damaged: its checksum is wrong")]
    assert host.copies.store.kept() == []


def test_a_copy_that_is_damaged_after_a_read_is_detected_by_the_next_readers(
    host: Host, client: ReplicaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other = host.worker(0), host.worker(1)
    for each in (worker, other):
        each.commit(C1, os.urandom(100_000))
    host.copies.replicate(C1, {0: []})
    assert host.report() == ("kept", worker.slot, C1)
    for each in (worker, other):
        read(client, copy_of(each, C1), 0, 5000)
    flip(host.kept_file(), 50_000)
    with open(f"/proc/self/fd/{other.buffers[0]}", "r+b") as file:
        flip(Path(file.name), 50_000)
    monkeypatch.setattr(replica_server, "_TRUST_S", 0.0)
    worker.commit(C2, b"2")
    worker.commit(C3, b"3")
    for each in (worker, other):
        with pytest.raises(CopyError, match=r"has no commit|is damaged"):
            read(client, copy_of(each, C1), 0, 5000)
    assert {host.report(), host.report()} == {("dropped", worker.slot, C1), ("damaged", other.slot, C1)}


@pytest.mark.parametrize("reads_all", [True, False])
def test_a_buffer_that_its_worker_overwrites_during_a_read_is_an_error(
    stack: ExitStack, host: Host, reads_all: bool
) -> None:
    """The reader has received the first bytes when the worker commits twice."""
    worker = host.worker()
    data = worker.commit(C1, os.urandom(24 << 20))
    begun, overwritten = threading.Event(), threading.Event()

    def pause(offset: int, part: bytes) -> bytes:
        if offset > 1 << 20:
            begun.set()
            assert overwritten.wait(30)
        return part

    proxy = stack.enter_context(Proxy(host.address, down=pause))
    client = stack.enter_context(closing(ReplicaClient({"a": proxy.address}, KEY, 10.0)))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(read, client, copy_of(worker, C1), 0, len(data))
        assert begun.wait(30)
        worker.commit(C2, b"2" * (24 << 20))
        if reads_all:
            worker.commit(C3, b"3" * (24 << 20))
        overwritten.set()
        if reads_all:
            with pytest.raises(CopyError, match=r"gone|changed"):
                answer.result()
        else:
            assert answer.result() == data, "the other buffer is not this copy"


@pytest.mark.parametrize("at", [20, 150, 300, 4000, 3 << 20])
def test_a_byte_that_changes_on_the_way_to_the_reader_is_an_error(stack: ExitStack, host: Host, at: int) -> None:
    worker = host.worker()
    data = worker.commit(C1, os.urandom(4 << 20))
    proxy = stack.enter_context(Proxy(host.address, down=flip_once(at)))
    client = stack.enter_context(closing(ReplicaClient({"a": proxy.address}, KEY, 10.0)))
    with pytest.raises(CopyError):
        read(client, copy_of(worker, C1), 0, len(data))
    assert read(client, copy_of(worker, C1), 0, len(data)) == data


def test_a_connection_that_breaks_while_it_is_idle_is_replaced(stack: ExitStack, host: Host) -> None:
    worker = host.worker()
    data = worker.commit(C1, b"x" * 1000)
    proxy = stack.enter_context(Proxy(host.address))
    client = stack.enter_context(closing(ReplicaClient({"a": proxy.address}, KEY, 10.0)))
    assert read(client, copy_of(worker, C1), 0, len(data)) == data
    proxy.cut()
    assert read(client, copy_of(worker, C1), 0, len(data)) == data
    assert proxy.streams == 2


def test_close_ends_a_read_that_waits(stack: ExitStack, host: Host) -> None:
    worker = host.worker()
    worker.commit(C1, b"x" * 1000)
    begun, ended = threading.Event(), threading.Event()

    def stop(offset: int, part: bytes) -> bytes:
        if offset > 70:  # after the authentication
            begun.set()
            assert ended.wait(30)
        return part

    proxy = stack.enter_context(Proxy(host.address, down=stop))
    client = ReplicaClient({"a": proxy.address}, KEY, 1000.0)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(read, client, copy_of(worker, C1), 0, 10)
        assert begun.wait(30)
        client.close()
        with pytest.raises(CollectiveError):
            answer.result()
        ended.set()
    with pytest.raises(CollectiveError, match="the world has ended"):
        client.header(copy_of(worker, C1))


@pytest.mark.parametrize("is_full", [True, False])
def test_close_ends_the_attempt_to_reach_a_server_that_does_not_answer(stack: ExitStack, is_full: bool) -> None:
    """The server accepts nothing. If its backlog is full, the attempt does not even connect."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    port = listener.getsockname()[1]
    if is_full:
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    client = ReplicaClient({"a": f"127.0.0.1:{port}"}, KEY, 1000.0)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.header, CopyOf("a", SlotId("a", 0), C1))
        wait_until(lambda: len(client._in_use) == 1, "an attempt")
        client.close()
        with pytest.raises(CollectiveError):
            answer.result()
