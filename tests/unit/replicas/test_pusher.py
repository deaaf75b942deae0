"""Replication: copies on the own host and on others, with real sockets and files."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import CopyOf
from elasticstate.replicas import pusher
from elasticstate.replicas.client import ReplicaClient
from elasticstate.replicas.pusher import Target
from tests.kit.commits import KEY, Host, wait_until
from tests.kit.ports import closed_port
from tests.kit.proxy import Proxy, flip_once

C1, C2, C3 = CommitId(1, 1), CommitId(1, 2), CommitId(1, 3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def read(hosts: list[Host], copy: CopyOf, length: int) -> bytes:
    data = bytearray(length)
    with closing(ReplicaClient({host.name: host.address for host in hosts}, KEY, 10.0)) as client:
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
        assert host.copies.store.kept() == [(worker.slot, C1)]
        assert read([a, b], CopyOf(host.name, worker.slot, C1), len(data)) == data
    a.copies.replicate(C3, {0: [b.target]})
    assert {a.report()[2], b.report()[2]} == {C3}
    assert read([a, b], CopyOf("b", worker.slot, C1), len(data)) == data, "the older copy stays until it is forgotten"
    wait_until(lambda: not a.is_read() and not b.is_read())
    for host in (a, b):
        host.copies.forget(C3)
    wait_until(lambda: a.copies.store.kept() == b.copies.store.kept() == [(worker.slot, C3)])
    assert read([a, b], CopyOf("b", worker.slot, C3), len(data)) == last
    spare = [name for name in (*a.files(), *b.files()) if name.endswith(".part")]
    assert (len(spare), len(a.files()), len(b.files())) == (2, 3, 3), "each host keeps one file for the next copy"
    assert [*a.log, *b.log] == []


def test_a_broken_push_continues_where_it_was(stack: ExitStack, tmp_path: Path) -> None:
    size, cut_at = 24 << 20, 9 << 20
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    cuts = iter([cut_at, cut_at])  # two broken connections, then a good one

    def cut(offset: int, part: bytes) -> bytes | None:
        nonlocal limit
        if offset == 0:
            limit = next(cuts, 0)
        return None if limit and offset > limit else part

    limit = 0
    proxy = stack.enter_context(Proxy(b.address, up=cut))
    worker = a.worker()
    data = worker.commit(C1, os.urandom(size))
    a.copies.replicate(C1, {0: [Target("b", proxy.address)]})
    assert b.report() == ("kept", worker.slot, C1)
    assert proxy.streams == 3
    assert proxy.carried < size + 3 * (2 << 20), "only bytes that were lost in buffers were sent again"
    assert read([b], CopyOf("b", worker.slot, C1), len(data)) == data
    assert len(a.log) == 1, "two attempts failed, one line says so"


def test_a_byte_that_changes_on_the_way_is_detected_and_the_copy_sent_again(stack: ExitStack, tmp_path: Path) -> None:
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    proxy = stack.enter_context(Proxy(b.address, up=flip_once(3 << 20)))
    worker = a.worker()
    data = worker.commit(C1, os.urandom(4 << 20))
    a.copies.replicate(C1, {0: [Target("b", proxy.address)]})
    assert b.report() == ("kept", worker.slot, C1)
    assert proxy.streams == 2
    assert "the checksum is wrong" in a.log[0]
    assert read([b], CopyOf("b", worker.slot, C1), len(data)) == data


def test_a_newer_order_cancels_one_that_waits(stack: ExitStack, tmp_path: Path) -> None:
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    arrived, ended = threading.Event(), threading.Event()

    def stop(offset: int, part: bytes) -> bytes:
        if offset > 1 << 20:
            arrived.set()
            assert ended.wait(30)
        return part

    proxy = stack.enter_context(Proxy(b.address, up=stop))
    worker = a.worker()
    worker.commit(C1, os.urandom(24 << 20))
    a.copies.replicate(C1, {0: [Target("b", proxy.address)]})
    assert a.report() == ("kept", worker.slot, C1)
    assert arrived.wait(30)
    data = worker.commit(C2, b"2" * 1000)
    a.copies.replicate(C2, {0: [b.target]})
    assert a.report() == b.report() == ("kept", worker.slot, C2)
    ended.set()
    assert read([b], CopyOf("b", worker.slot, C2), len(data)) == data
    assert b.copies.store.kept() == [(worker.slot, C2)], "the incomplete copy is gone"


def test_an_unreachable_target_does_not_delay_the_others(stack: ExitStack, tmp_path: Path) -> None:
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    closed, _ = stack.enter_context(closed_port())
    nobody = f"127.0.0.1:{closed}"
    first, second = a.worker(0), a.worker(1)
    for worker in (first, second):
        worker.commit(C1, b"1" * 1000)
    a.copies.replicate(C1, {0: [Target("c", nobody), b.target], 1: [Target("c", nobody), b.target]})
    assert {b.report()[1], b.report()[1]} == {first.slot, second.slot}
    assert all("host c" in line and "refused" in line for line in a.log)


def test_a_commit_that_its_worker_has_overwritten_is_reported_as_dropped(stack: ExitStack, tmp_path: Path) -> None:
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    worker = a.worker()
    for commit in (C1, C2, C3):
        worker.commit(commit, b"x" * 1000)
    a.copies.replicate(C1, {0: [b.target]})
    assert a.report() == ("dropped", worker.slot, C1)
    assert "newer commits" in a.log[0]
    a.copies.replicate(C2, {0: [b.target]})
    assert a.report() == b.report() == ("kept", worker.slot, C2)


def test_a_copy_during_which_its_worker_commits_twice_is_dropped(stack: ExitStack, tmp_path: Path) -> None:
    """The worker overwrites the buffer after the copy has begun: the page has no such seal at the end."""
    a = stack.enter_context(Host("a", tmp_path))
    worker = a.worker()
    worker.commit(C1, os.urandom(8 << 20))
    store = a.copies.store
    begin = store.begin

    def overwrite(*arguments: Any) -> Any:
        found = begin(*arguments)
        for commit in (C2, C3):
            worker.commit(commit, b"x" * (8 << 20))
        return found

    store.begin = overwrite  # type: ignore[method-assign]
    a.copies.replicate(C1, {0: []})
    assert a.report() == ("dropped", worker.slot, C1)
    assert a.copies.store.kept() == []
    assert a.files() == [], "nothing of the torn copy is left"


@pytest.mark.parametrize("is_to_come", [False, True])
def test_workers_are_asked_to_wait_only_for_a_commit_that_was_still_to_come(
    stack: ExitStack, tmp_path: Path, is_to_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of all slots are pinned before the first one is copied, each until its own copy is made, and for a
    second at most."""
    monkeypatch.setattr(pusher, "_PIN_BYTES_PER_S", 1)
    most_ns = 1_000_000_000
    a = stack.enter_context(Host("a", tmp_path))
    workers = [a.worker(slot) for slot in (0, 1)]
    for worker in workers:
        worker.commit(C1, b"1" * 1000)
    pinned: list[list[bool]] = []
    begin = a.copies.store.begin

    def look(*arguments: Any) -> Any:
        now = time.monotonic_ns()
        assert all(worker.page.pinned_until(1) <= now + most_ns for worker in workers)
        pinned.append([worker.page.pinned_until(1) > 0 for worker in workers])
        return begin(*arguments)

    a.copies.store.begin = look  # type: ignore[method-assign]
    if is_to_come:
        looks: list[SlotId] = []
        newest = a.copies._library.buffers.newest
        a.copies._library.buffers.newest = lambda slot: (newest(slot), looks.append(slot))[0]  # type: ignore
        a.copies.replicate(C2, {0: [], 1: []})
        wait_until(lambda: len(looks) > 4, "waiting for the seals")
    for worker in workers:
        worker.commit(C2, b"2" * 1000)
    if not is_to_come:
        a.copies.replicate(C2, {0: [], 1: []})
    assert [a.report(), a.report()] == [("kept", worker.slot, C2) for worker in workers]
    assert pinned == ([[True, True], [False, True]] if is_to_come else [[False, False]] * 2)
    wait_until(lambda: not any(worker.page.pinned_until(1) for worker in workers), "the end of the pins")


@pytest.mark.parametrize("is_kept", [False, True])
def test_damage_at_the_source_is_reported_and_nothing_is_sent(stack: ExitStack, tmp_path: Path, is_kept: bool) -> None:
    """A buffer is damaged before its agent copies it, or the copy while its target cannot be reached."""
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    worker = a.worker()
    worker.commit(C1, b"x" * 100_000)
    if not is_kept:
        os.pwrite(worker.buffers[0], b"y", 50_000)
        a.copies.replicate(C1, {0: [b.target]})
        assert [a.report(), a.report()] == [("damaged", worker.slot, C1), ("dropped", worker.slot, C1)]
    else:
        is_reachable = threading.Event()
        proxy = stack.enter_context(Proxy(b.address, up=lambda _, part: part if is_reachable.is_set() else None))
        a.copies.replicate(C1, {0: [Target("b", proxy.address)]})
        assert a.report() == ("kept", worker.slot, C1)
        wait_until(lambda: bool(a.log), "a failed attempt")
        with open(a.kept_file(), "r+b") as file:
            file.seek(50_000)
            file.write(b"y")
        worker.commit(C2, b"2")
        worker.commit(C3, b"3")
        is_reachable.set()
        assert {a.report()[0], a.report()[0]} == {"dropped"}
        assert [keeper for keeper, _ in a.reasons] == ["a", "b"]
    assert b.copies.store.kept() == []


def test_a_target_that_stays_unreachable_is_given_up(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher, "_UNREACHABLE_S", 0.05)
    a = stack.enter_context(Host("a", tmp_path))
    closed, _ = stack.enter_context(closed_port())
    nobody = f"127.0.0.1:{closed}"
    worker = a.worker()
    worker.commit(C1, b"x" * 1000)
    a.copies.replicate(C1, {0: [Target("c", nobody)]})
    assert [a.report(), a.report()] == [("kept", worker.slot, C1), ("dropped", worker.slot, C1)]
    ((keeper, reason),) = a.reasons
    assert keeper == "c"
    assert "refused" in reason


def test_the_rate_is_an_upper_limit(stack: ExitStack, tmp_path: Path) -> None:
    a = stack.enter_context(Host("a", tmp_path, rate=20e6))
    b = stack.enter_context(Host("b", tmp_path))
    worker = a.worker()
    worker.commit(C1, os.urandom(4 << 20))
    begin = time.monotonic()
    a.copies.replicate(C1, {0: [b.target]})
    assert b.report() == ("kept", worker.slot, C1)
    # The first piece is sent at once.
    assert time.monotonic() - begin > (4 << 20) / 20e6 - 0.06


def test_at_no_time_more_bytes_have_arrived_than_the_rate_allows(stack: ExitStack, tmp_path: Path) -> None:
    rate, size = 20e6, 8 << 20
    a, b = stack.enter_context(Host("a", tmp_path, rate=rate)), stack.enter_context(Host("b", tmp_path))
    worker = a.worker()
    worker.commit(C1, os.urandom(size))
    begin, on_the_way = time.monotonic(), 0
    a.copies.replicate(C1, {0: [b.target]})
    while not b.copies.store.kept():
        received = b.copies.figures().received_bytes
        assert received <= rate * (time.monotonic() - begin + 0.05), "the bucket holds the bytes of 0.05 s"
        on_the_way += 0 < received < size
        time.sleep(0.001)
    assert on_the_way, "the copy was never seen on its way"
    assert a.copies.figures() == (a.copies.store.size_bytes(), b.copies.figures().received_bytes, 0)
    assert b.copies.figures().sent_bytes == 0
    assert b.copies.figures().received_bytes >= size
    assert b.copies.figures().memory_bytes >= size


def test_the_memory_of_copies_counts_those_that_arrive_and_falls_when_they_are_forgotten(
    stack: ExitStack, tmp_path: Path
) -> None:
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    assert b.copies.figures() == (0, 0, 0)
    worker = a.worker()
    for commit in (C1, C2):
        worker.commit(commit, os.urandom(3 << 20))
        a.copies.replicate(commit, {0: [b.target]})
        assert {a.report()[2], b.report()[2]} == {commit}
    one = os.stat(b.path / "copies" / next(name for name in b.files() if name.endswith(".safetensors"))).st_size
    assert b.copies.figures().memory_bytes == 2 * one
    b.copies.forget(C3)
    wait_until(lambda: not b.copies.store.kept())
    assert b.copies.figures().memory_bytes == one, "one file waits for the next copy"


def test_a_target_with_another_key_gets_nothing(stack: ExitStack, tmp_path: Path) -> None:
    a = stack.enter_context(Host("a", tmp_path))
    b = stack.enter_context(Host("b", tmp_path, key=b"o" * 32))
    proxy = stack.enter_context(Proxy(b.address))
    worker = a.worker()
    worker.commit(C1, b"secret" * 1000)
    a.copies.replicate(C1, {0: [Target("b", proxy.address)]})
    wait_until(lambda: bool(a.log and b.log), "a refusal at both ends")
    assert "closed the connection before both ends had authenticated" in a.log[0]
    assert "does not belong to this job" in b.log[0]
    assert proxy.carried < 200 * proxy.streams


def test_the_end_of_an_agent_does_not_wait_for_a_target_that_does_not_answer(stack: ExitStack, tmp_path: Path) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    a = Host("a", tmp_path, timeout_s=1000.0)
    worker = a.worker()
    worker.commit(C1, b"x" * 1000)
    a.copies.replicate(C1, {0: [Target("b", f"127.0.0.1:{listener.getsockname()[1]}")]})
    connection, _ = listener.accept()
    stack.enter_context(connection)
    a.close()
    connection.settimeout(30)
    assert connection.recv(100) == b"", "the agent has closed the connection"


def test_copies_that_are_kept_already_are_reported_again(stack: ExitStack, tmp_path: Path) -> None:
    """A new driver may give the order of the previous one again. Nothing is sent twice."""
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    proxy = stack.enter_context(Proxy(b.address))
    worker = a.worker()
    worker.commit(C1, b"x" * (2 << 20))
    for _ in range(2):
        a.copies.replicate(C1, {0: [Target("b", proxy.address)]})
        assert a.report() == b.report() == ("kept", worker.slot, C1)
    assert proxy.carried < 3 << 20


def test_an_order_that_comes_with_an_order_to_forget_is_carried_out(stack: ExitStack, tmp_path: Path) -> None:
    """The pusher has ended an older order, and has not begun the new one."""
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    worker = a.worker()
    for commit in (C1, C2):
        worker.commit(commit, os.urandom(100_000))
        a.copies.replicate(commit, {0: [b.target]})
        for _ in range(50):
            a.copies.forget(commit)
        assert {a.report(), b.report()} == {("kept", worker.slot, commit)}


def test_after_a_stop_an_older_commit_replaces_the_incomplete_copy_of_a_newer_one(
    stack: ExitStack, tmp_path: Path
) -> None:
    a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
    proxy = stack.enter_context(Proxy(b.address, lambda offset, part: None if offset > 4 << 20 else part))
    worker = a.worker()
    for commit in (C1, C2):
        worker.commit(commit, os.urandom(12 << 20))
    a.copies.replicate(C2, {0: [Target("b", proxy.address)]})
    assert a.report() == ("kept", worker.slot, C2)
    wait_until(lambda: b.copies.figures().memory_bytes > 0)
    a.copies.stop_replication()
    a.copies.replicate(C1, {0: [b.target]})
    assert {a.report(), b.report()} == {("kept", worker.slot, C1)}
    assert a.copies.store.kept() == [(worker.slot, C1), (worker.slot, C2)], "a stop removes nothing"
    a.copies.replicate(C2, {0: [b.target]})
    assert {a.report(), b.report()} == {("kept", worker.slot, C2)}
