"""Replication: copies on the own host and on others, with real sockets and files."""

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
from tests.unit.copies.made import KEY
from tests.unit.copies.waiting import wait_until

C1, C2, C3 = CommitId(1, 1), CommitId(1, 2), CommitId(1, 3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def read(hosts: list[Host], copy: CopyOf, length: int) -> bytes:
    data = bytearray(length)
    with CopyClient({host.name: host.address for host in hosts}, KEY, 10.0) as client:
        client.read_into(copy, [(0, memoryview(data))])
    return bytes(data)


def test_a_commit_is_kept_on_its_host_and_on_another_until_it_is_forgotten(stack: ExitStack, tmp_path: Path) -> None:
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    worker = a.worker()
    data = worker.commit(C1, os.urandom(5 << 20))
    a.copies.replicate(C1, {0: [b.target]})
    assert a.report() == ("kept", worker.slot, C1)
    assert b.report() == ("kept", worker.slot, C1)
    for commit in (C2, C3):
        last = worker.commit(commit, os.urandom(5 << 20))
    for host in (a, b):
        assert host.copies.kept() == [(worker.slot, C1)]
        assert read([a, b], CopyOf(host.name, worker.slot, C1), len(data)) == data
    a.copies.replicate(C3, {0: [b.target]})
    assert {a.report()[2], b.report()[2]} == {C3}
    assert read([a, b], CopyOf("b", worker.slot, C1), len(data)) == data, "the older copy stays until it is forgotten"
    for host in (a, b):
        host.copies.forget(C3)
    wait_until(lambda: a.copies.kept() == b.copies.kept() == [(worker.slot, C3)])
    assert read([a, b], CopyOf("b", worker.slot, C3), len(data)) == last
    spare = [name for name in (*a.files(), *b.files()) if name.endswith(".part")]
    assert (len(spare), len(a.files()), len(b.files())) == (2, 3, 3), "each host keeps one file for the next copy"
    assert [*a.log, *b.log] == []
