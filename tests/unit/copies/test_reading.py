"""Reading of copies: a server and a client in one process, with real sockets and files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticstate.copies.client import CopyClient
from elasticstate.core.copies import CopyOf
from elasticstate.core.ids import CommitId
from tests.unit.copies.hosts import Host
from tests.unit.copies.made import KEY, Worker

C1, C2, C3 = CommitId(1, 1), CommitId(1, 2), CommitId(1, 3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def host(stack: ExitStack, tmp_path: Path) -> Host:
    return stack.enter_context(Host("a", tmp_path))


@pytest.fixture
def client(stack: ExitStack, host: Host) -> CopyClient:
    return stack.enter_context(CopyClient({"a": host.address}, KEY, 10.0))


def copy_of(worker: Worker, commit: CommitId, host: str = "a") -> CopyOf:
    return CopyOf(host, worker.slot, commit)


def read(client: CopyClient, copy: CopyOf, offset: int, length: int) -> bytes:
    data = bytearray(length)
    client.read_into(copy, [(offset, memoryview(data))])
    return bytes(data)


@pytest.mark.parametrize("size", [10, 3 << 20, 70 << 20])
def test_a_commit_in_a_buffer_is_read_by_its_ranges(host: Host, client: CopyClient, size: int) -> None:
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
