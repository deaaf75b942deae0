"""Random programs of commits, crashes and new workers: the newest sealed commit always exists, bit for bit.

A program runs the operations of an agent and its workers on the two buffers of one slot: commits whose tensors change
in number, size, shape and dtype, restamps, commits received from another worker, reservations, new workers. A crash
ends an operation before a random line of the code under test. The oracle keeps a copy of every commit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import elasticstate
from elasticstate.agent.host_storage import HostStorage, StorageAllocator
from elasticstate.agent.supervisor import Liveness
from elasticstate.commits import CommitDirectory
from elasticstate.core.ids import CommitId
from elasticstate.net.link import Given
from elasticstate.net.messages import BufferGrown, GrowBuffer
from elasticstate.state.snapshot import Snapshot
from elasticstate.worker.storage import AgentStorage
from tests.kit.simulation.schedules import some_of
from tests.kit.state import read_commit

OPERATIONS = 25
SLOT = 0
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
CODE = str(Path(elasticstate.__file__).parent)


class Crash(BaseException):
    """The simulated end of the worker or the agent."""


@contextmanager
def crash_before_line(number: int) -> Iterator[None]:
    """Raise Crash before the ``number``-th line of the package that runs inside the block."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Crash
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


class Slot:
    """One slot of a host with its agent and its worker, and the oracle."""

    def __init__(self, base: Path, seed: int) -> None:
        self.random = Random(seed)
        self.directory = CommitDirectory(str(base), f"job{seed}", "h", str(base), "/socket", 5.0, 300.0)
        self.storage = HostStorage(self.directory, f"job{seed}", "h", lambda _: None)
        self.owner = self.storage.owner(SLOT)
        self.result = self.storage.make_result(SLOT)
        self.liveness = Liveness(self.storage.files(SLOT).page, self.owner)
        self.allocator = StorageAllocator(self.storage, lambda: 1)
        self.contents: dict[CommitId, tuple[dict[str, Any], bytes]] = {}
        self.may_be_newest: set[CommitId | None] = {None}
        self.id = CommitId(1, 0)
        self.crashes = self.resumed = 0
        self.worker_storage: AgentStorage | None = None
        self.start_worker()

    def close(self) -> None:
        self.allocator.close()
        self.end_worker()
        self.storage.close()
        self.directory.remove()

    # ------------------------------------------------------------------------------------------------ operations

    def start_worker(self) -> None:
        if self.worker_storage is not None:
            self.end_worker()
        self.worker_storage = AgentStorage(self.give, self.owner, self.ask)
        self.snapshot = Snapshot(self.worker_storage)

    def end_worker(self) -> None:
        assert self.worker_storage is not None
        for fd in self.worker_storage._buffers:
            os.close(fd)

    def give(self) -> Given:
        page, first, second = map(os.dup, self.storage.files(SLOT).descriptors)
        return Given(b"key", page, (first, second), os.dup(self.result), None)

    def ask(self, question: GrowBuffer, answer: type[BufferGrown]) -> BufferGrown:
        trace = sys.gettrace()
        sys.settrace(None)  # the agent survives the crash of its worker
        try:
            length, error = asyncio.run(
                self.allocator.make(SLOT, question.index, question.bytes, self.liveness.holds_commit)
            )
        finally:
            sys.settrace(trace)
        return BufferGrown(question.index, length, error)

    def content(self) -> dict[str, Any]:
        """Return values of random number, size, shape and dtype. Some of them are much larger."""
        pick, found = self.random, {}
        for name in pick.sample("abcdefgh", pick.randrange(6)):
            shape = [pick.choice((0, 1, 2, 3, 7)) for _ in range(pick.randrange(4))]
            if pick.random() < 0.15:
                shape = [pick.randrange(1, 400_000)]
            raw = torch.from_numpy(np.frombuffer(pick.randbytes(64), dtype=np.uint8).copy()).float()
            tensor = raw.repeat(int(np.prod(shape)) // 64 + 1)[: int(np.prod(shape))].reshape(shape)
            found[name] = tensor.to(pick.choice(DTYPES)) if pick.random() < 0.7 else tensor.numpy()
        found["n"] = pick.randrange(1000)
        found["text"] = "x" * (pick.randrange(200_000) if pick.random() < 0.2 else pick.randrange(20))
        return found

    def next_id(self) -> CommitId:
        generation, tick = self.id
        self.id = CommitId(generation + 1, 0) if self.random.random() < 0.2 else CommitId(generation, tick + 1)
        return self.id

    def commit(self) -> None:
        content, private, commit = self.content(), self.random.randbytes(self.random.randrange(6000)), self.next_id()
        self.contents[commit] = content, private
        self.may_be_newest.add(commit)
        self.snapshot.write(content, private, commit)
        self.may_be_newest = {commit}

    def restamp(self) -> None:
        newest = self.snapshot.newest
        if newest is None:
            return
        commit = CommitId(self.id.generation + 1, 0)
        self.id = commit
        self.contents[commit] = self.contents[newest]
        self.may_be_newest.add(commit)
        self.snapshot.restamp(commit)
        self.may_be_newest = {commit}

    def receive(self) -> None:
        """Receive a commit from another worker, with the messages of a sync."""
        content, private, commit = self.content(), self.random.randbytes(100), self.next_id()
        sender = Snapshot()
        sender.write(content, b"", CommitId(1, 1))
        header, payload = sender.outgoing()
        self.contents[commit] = content, private
        self.may_be_newest.add(commit)
        self.snapshot.incoming(header, private).copy_(payload)
        self.snapshot.seal_incoming(commit, self.snapshot.load_incoming({}))
        self.may_be_newest = {commit}

    def reserve(self) -> None:
        self.snapshot.reserve(self.random.randrange(1 << 21))

    def restart(self) -> None:
        """Replace the worker. Before or after that, the agent grows its buffers to the size of the largest commit."""
        size = self.random.choice((0, self.random.randrange(1, 1 << 22)))
        is_late = self.random.random() < 0.5
        if is_late:
            self.start_worker()
        if size:
            asyncio.run(self.allocator.reserve(SLOT, size, self.liveness.holds_commit))
        if not is_late:
            self.start_worker()
        self.resumed += self.snapshot.newest is not None

    # ----------------------------------------------------------------------------------------------------- oracle

    def check(self) -> None:
        newest, previous = self.snapshot.newest, self.snapshot.previous
        assert newest in self.may_be_newest, f"{newest} is held, {self.may_be_newest} was sealed"
        for commit in (newest, previous):
            if commit is not None:
                content, private = self.contents[commit]
                values = read_commit(self.snapshot, commit)
                assert set(values) == set(content), commit
                assert all(same(content[name], values[name]) for name in content), commit
                assert self.snapshot.read_private(commit) == private, commit
        self.may_be_newest = {newest}

    def run(self) -> None:
        operations: list[Callable[[], None]] = [self.commit] * 6 + [self.restamp, self.receive, self.reserve]
        for _ in range(OPERATIONS):
            if self.random.random() < 0.25:
                try:
                    with crash_before_line(self.random.randrange(1, 250)):
                        self.random.choice(operations)()
                except Crash:
                    self.crashes += 1
                    self.restart()
            else:
                self.random.choice([*operations, self.restart, self.restart])()
            self.check()


def test_the_newest_sealed_commit_is_restored_after_any_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, schedules: range
) -> None:
    programs = some_of(schedules, 8)
    crashes = resumed = 0
    with caplog.at_level(logging.WARNING, "elasticstate"):
        for seed in programs:
            slot = Slot(tmp_path, seed)
            try:
                slot.run()
            except AssertionError as error:
                raise AssertionError(f"program {seed}: {error}") from error
            finally:
                slot.close()
            crashes, resumed = crashes + slot.crashes, resumed + slot.resumed
    assert not caplog.text, "no commit is found damaged"
    assert crashes > len(programs), "crashes did happen"
    assert resumed > len(programs), "new workers found a commit"
