"""Copies that the worker's own host keeps: real files and servers; bytes come from memory, verified by the server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticstate.core.ids import CommitId
from elasticstate.core.types import CopyOf
from elasticstate.errors import CollectiveError, CopyError
from elasticstate.replicas.client import ReplicaClient
from elasticstate.worker.storage import LocalReplicas
from tests.kit.commits import KEY, Host, content, seal_of

C1, C2 = CommitId(1, 1), CommitId(1, 2)
SIZE = 3 << 20


class Reader(LocalReplicas):
    """Reader on host "a". It counts what the servers send, and the answers of its agent."""

    def __init__(self, hosts: list[Host]) -> None:
        self.fetched = 0
        self.given: list[bool] = []
        client = ReplicaClient({host.name: host.address for host in hosts}, KEY, 10.0)
        read_into = client.read_into

        def counting(copy: CopyOf, ranges: Any) -> None:
            self.fetched += sum(len(target) for _, target in ranges)
            read_into(copy, ranges)

        client.read_into = counting  # type: ignore[method-assign]

        def share(*key: Any) -> Any:
            found = hosts[0].copies.store.share(*key)
            self.given.append(found is not None)
            return found

        super().__init__(client, "a", share)

    def bytes_of(self, copy: CopyOf, offset: int, length: int) -> bytes:
        """Open a copy and read a part of it, as a reshard does."""
        self.header(copy)
        self.length(copy)
        return self.again(copy, offset, length)

    def again(self, copy: CopyOf, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_into(copy, [(offset + at, memoryview(data)[at : at + 1000]) for at in range(0, length, 1000)])
        return bytes(data)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Host(name, tmp_path)) for name in ("a", "b")]


@pytest.fixture
def reader(hosts: list[Host]) -> Iterator[Reader]:
    found = Reader(hosts)
    yield found
    found.close()


def kept(host: Host, commit: CommitId, data: bytes, owner: Host | None = None) -> tuple[CopyOf, bytes]:
    """Let a host keep a copy of a commit of the other host's slot. Return it and its sealed bytes."""
    slot = Host.slot_of("b" if owner is None else owner.name)
    sealed, length = content(data)
    incoming = host.copies.store.begin(seal_of(slot, commit, sealed, length), len(sealed))
    assert incoming is not None
    with incoming.owned(lambda: None, lambda: True):
        incoming.write(memoryview(sealed)[:length])
        host.copies.store.finish(incoming)
    return CopyOf(host.name, slot, commit), sealed[:length]


def test_a_copy_of_the_own_host_is_read_from_its_memory(hosts: list[Host], reader: Reader) -> None:
    copy, data = kept(hosts[0], C1, os.urandom(SIZE))
    assert reader.bytes_of(copy, 4096, SIZE) == data[4096 : 4096 + SIZE]
    assert reader.again(copy, 5, 100) == data[5:105]
    assert (reader.fetched, reader.given) == (0, [True])
    with pytest.raises(CopyError, match="outside a buffer"):
        reader.again(copy, len(data) - 5, 10)


def test_a_copy_on_another_host_and_a_buffer_are_read_from_the_server(hosts: list[Host], reader: Reader) -> None:
    remote, data = kept(hosts[1], C1, os.urandom(SIZE), hosts[0])
    assert reader.bytes_of(remote, 0, SIZE) == data[:SIZE]
    worker = hosts[0].worker()
    data = worker.commit(C2, os.urandom(SIZE))
    assert reader.bytes_of(CopyOf("a", worker.slot, C2), 0, SIZE) == data[:SIZE]
    assert (reader.fetched, reader.given) == (2 * SIZE, [False])


def test_a_damaged_copy_is_detected_and_reported_when_it_is_opened(hosts: list[Host], reader: Reader) -> None:
    copy, _ = kept(hosts[0], C1, os.urandom(SIZE))
    with open(hosts[0].kept_file(), "r+b") as file:
        file.seek(SIZE // 2)
        (byte,) = file.read(1)
        file.seek(SIZE // 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CopyError, match="has no commit"):
        reader.bytes_of(copy, 0, SIZE)
    assert hosts[0].report() == ("dropped", copy.slot, C1)
    assert reader.given == []


def test_a_file_that_a_worker_reads_gets_no_other_content(hosts: list[Host], reader: Reader) -> None:
    copy, data = kept(hosts[0], C1, os.urandom(SIZE))
    assert reader.bytes_of(copy, 0, 100) == data[:100]
    store = hosts[0].copies.store
    kept(hosts[0], C2, os.urandom(SIZE))
    assert sorted(store.kept()) == [(copy.slot, C1), (copy.slot, C2)]
    store.forget(C2)
    assert store.kept() == [(copy.slot, C2)]
    kept(hosts[0], CommitId(1, 3), os.urandom(SIZE))  # would use the file of the first copy again
    assert reader.again(copy, 0, SIZE) == data[:SIZE]


def test_a_copy_with_another_content_than_the_opened_one_is_not_mapped(hosts: list[Host], reader: Reader) -> None:
    copy, _ = kept(hosts[0], C1, b"1" * SIZE)
    reader.length(copy)
    _, data = kept(hosts[0], C1, b"2" * SIZE)
    assert reader.again(copy, 4096, SIZE) == data[4096 : 4096 + SIZE]
    assert (reader.fetched, reader.given) == (SIZE, [True])


def test_a_reader_that_another_thread_has_closed_raises(hosts: list[Host], reader: Reader) -> None:
    copy, _ = kept(hosts[0], C1, os.urandom(SIZE))
    reader.bytes_of(copy, 0, 10)
    reader._client.close()
    with pytest.raises(CollectiveError, match="the world has ended"):
        reader.again(copy, 0, 10)
