"""SIGKILL of the source and of the target of a push, at each stage. The agents are processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import ClassVar

import pytest

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.types import CopyOf
from elasticstate.replicas.client import ReplicaClient
from tests.kit.commits import KEY, Host, content, wait_until
from tests.kit.proxy import Proxy

SIZE = 8 << 20
C1, SLOT = CommitId(1, 1), SlotId("a", 0)
DATA, LENGTH = content(bytes(range(256)) * (SIZE // 256))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture(autouse=True)
def _ends_all_processes() -> Iterator[None]:
    """A failed test leaves none to the next one."""
    yield
    for source in HostProcess.started:
        if source.process.poll() is None:
            source.kill()
    HostProcess.started.clear()


class HostProcess:
    """An agent's copies in a process of their own."""

    started: ClassVar[list[HostProcess]] = []

    def __init__(self, name: str, directory: Path, *replicate: str, stop_before: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("host_process.py")), name, str(directory), *replicate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "STOP_BEFORE": stop_before},
            text=True,
        )
        self.started.append(self)
        self.address = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(30) == -signal.SIGKILL
        self._close()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        self._close()

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Gate:
    """Stops the bytes of the first stream at one offset, for as long as it is closed."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.arrived, self.opened = threading.Event(), threading.Event()

    def __call__(self, offset: int, part: bytes) -> bytes | None:
        if offset + len(part) >= self.at and not self.opened.is_set():
            self.arrived.set()
            assert self.opened.wait(60)
            return None
        return part


def check(address: str) -> None:
    data = bytearray(LENGTH)
    with closing(ReplicaClient({"b": address}, KEY, 10.0)) as client:
        client.read_into(CopyOf("b", SLOT, C1), [(0, memoryview(data))])
    assert data == DATA[:LENGTH]


# The request, the first bytes, the middle, the last bytes.
@pytest.mark.parametrize("at", [100, 1000, SIZE // 2, LENGTH])
def test_a_target_that_is_killed_during_a_push_gets_the_copy_later(stack: ExitStack, tmp_path: Path, at: int) -> None:
    gate = Gate(at)
    first = HostProcess("b", tmp_path)
    a, proxy = stack.enter_context(Host("a", tmp_path)), stack.enter_context(Proxy(first.address, up=gate))
    a.worker().commit(C1, bytes(range(256)) * (SIZE // 256))
    target = type(a.target)("b", proxy.address)
    a.copies.replicate(C1, {0: [target]})
    assert gate.arrived.wait(30)
    first.kill()
    assert not list((tmp_path / "b" / "copies").glob("*.seal")), "an incomplete copy is no copy"
    b = stack.enter_context(Host("b", tmp_path))
    assert (b.copies.store.kept(), b.files()) == ([], [])
    proxy.lead_to(b.address)
    gate.opened.set()
    assert b.report() == ("kept", SLOT, C1)
    check(b.address)


def test_a_target_that_is_killed_after_a_push_still_has_the_copy(stack: ExitStack, tmp_path: Path) -> None:
    first = HostProcess("b", tmp_path)
    a = stack.enter_context(Host("a", tmp_path))
    a.worker().commit(C1, bytes(range(256)) * (SIZE // 256))
    a.copies.replicate(C1, {0: [type(a.target)("b", first.address)]})
    wait_until(lambda: bool(list((tmp_path / "b" / "copies").glob("*.seal"))), "the copy on host b")
    first.kill()
    b = stack.enter_context(Host("b", tmp_path))
    check(b.address)


def test_a_source_that_is_killed_during_a_push_leaves_an_agent_that_continues(stack: ExitStack, tmp_path: Path) -> None:
    gate = Gate(SIZE // 2)
    b = stack.enter_context(Host("b", tmp_path))
    proxy = stack.enter_context(Proxy(b.address, up=gate))
    source = HostProcess("a", tmp_path, str(SIZE), proxy.address)
    assert gate.arrived.wait(30)
    source.kill()
    gate.opened.set()
    carried = proxy.carried
    assert 0 < carried < SIZE
    assert b.copies.store.kept() == []
    a = stack.enter_context(Host("a", tmp_path))
    assert a.copies.store.kept() == [(SLOT, C1)], "the copy on the own host is complete: the next agent takes it over"
    a.copies.replicate(C1, {0: [type(a.target)("b", proxy.address)]})
    assert b.report() == ("kept", SLOT, C1)
    assert proxy.carried < SIZE + (2 << 20), "the bytes that had arrived were not sent again"
    check(b.address)


@pytest.mark.parametrize("stage", ["finish", "seal"])
def test_a_source_that_is_killed_while_it_makes_its_own_copy_leaves_nothing(tmp_path: Path, stage: str) -> None:
    source = HostProcess("a", tmp_path, str(SIZE), "127.0.0.1:1", stop_before=stage)
    assert "stopped" in (source.address, source.line())
    files = os.listdir(tmp_path / "a" / "copies")
    assert [Path(name).suffix for name in files] == [".part" if stage == "finish" else ".safetensors"]
    source.kill()
    with Host("a", tmp_path) as a:
        assert (a.copies.store.kept(), a.files()) == ([], [])


def test_two_processes_replicate_to_each_other(tmp_path: Path) -> None:
    b = HostProcess("b", tmp_path)
    a = HostProcess("a", tmp_path, str(SIZE), b.address)
    wait_until(lambda: bool(list((tmp_path / "b" / "copies").glob("*.seal"))), "the copy on host b")
    check(b.address)
    a.end()
    b.end()
