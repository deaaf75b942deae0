"""Staging of a commit that its worker may overwrite at any moment."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elasticstate._native import ControlPage
from elasticstate.agent import staging
from elasticstate.agent.staging import Staged, TornError, stage
from elasticstate.core.types import CommitId
from elasticstate.private import open_directory
from elasticstate.state.snapshot import Snapshot

KEY, OWNER = b"k" * 32, b"o" * 16


class Worker:
    """A worker's snapshot in files, as an agent has them open."""

    def __init__(self, folder: Path) -> None:
        self.key, self.owner = KEY, OWNER
        self.fds = [os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("page", "0", "1")]
        os.ftruncate(self.fds[0], 4096)
        self.page = ControlPage(self.fds[0])
        self.folder = folder
        folder.chmod(0o700)
        self.directory = open_directory(folder)
        self.snapshot = Snapshot(self)
        self.tick = 0

    def renew(self) -> None:
        raise AssertionError("the page is never stale here")

    def open(self, index: int) -> torch.Tensor:
        length = os.fstat(self.fds[1 + index]).st_size
        if not length:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.fds[1 + index], length), dtype=torch.uint8)

    def grow(self, index: int, size_bytes: int) -> torch.Tensor:
        os.ftruncate(self.fds[1 + index], size_bytes)
        return self.open(index)

    def commit(self) -> None:
        self.tick += 1
        values = {"weight": torch.full((1 << 16,), float(self.tick)), "step": self.tick}
        self.snapshot.write(values, b"random", CommitId(1, self.tick))

    def stage(self) -> Staged | None:
        return stage(self.page, (self.fds[1], self.fds[2]), OWNER, KEY, self.directory)

    def close(self) -> None:
        for fd in (*self.fds, self.directory):
            os.close(fd)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.close()


def content(staged: Staged | None) -> set[float]:
    """Return the values of the weight in a staged commit, and close it."""
    assert staged is not None
    with os.fdopen(staged.fd, "rb") as file:
        file.seek(0)
        data = file.read()
    assert len(data) == staged.size_bytes
    found = staging.cut(memoryview(data))
    return set(torch.frombuffer(bytearray(data[found.tensors : found.objects]), dtype=torch.float32).tolist())


def while_copying(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], times: int) -> list[int]:
    """Act in the middle of each copy, at most so often. Return the list of the copies, which grows."""
    copies: list[int] = []
    plain = staging._copy

    def copy(source: int, target: int, length: int) -> None:
        plain(source, target, length // 2)
        if len(copies) < times:
            act()
        copies.append(length)
        plain(source, target, length)

    monkeypatch.setattr(staging, "_copy", copy)
    return copies


def test_a_slot_without_a_commit_has_nothing_to_stage(worker: Worker) -> None:
    assert worker.stage() is None


def test_the_newest_commit_is_staged(worker: Worker) -> None:
    worker.commit()
    worker.commit()
    staged = worker.stage()
    assert staged is not None
    assert staged.commit == CommitId(1, 2)
    assert content(staged) == {2.0}
    assert not list(worker.folder.glob("durable*")), "the staged file has no name"


def test_a_commit_that_is_overwritten_is_staged_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.commit()

    def two_commits() -> None:
        worker.commit()
        worker.commit()

    copies = while_copying(monkeypatch, two_commits, times=2)
    staged = worker.stage()
    assert staged is not None
    assert len(copies) == 3
    assert staged.commit == CommitId(1, 5)
    assert content(staged) == {5.0}


def test_one_commit_beside_the_copy_does_not_matter(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.commit()
    copies = while_copying(monkeypatch, worker.commit, times=1)
    assert content(worker.stage()) == {1.0}
    assert len(copies) == 1


def test_a_worker_that_is_always_faster_is_an_error(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.commit()
    worker.commit()

    def two_commits() -> None:
        worker.commit()
        worker.commit()

    while_copying(monkeypatch, two_commits, times=1000)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TornError, match="Commit less often"):
        worker.stage()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_commit_is_an_error(worker: Worker) -> None:
    worker.commit()
    os.pwrite(worker.fds[1], b"damage", os.fstat(worker.fds[1]).st_size // 2)
    with pytest.raises(ValueError, match="its checksum is wrong"):
        worker.stage()


def test_a_commit_with_the_seal_of_another_job_is_an_error(worker: Worker) -> None:
    worker.key = b"x" * 32
    worker.commit()
    with pytest.raises(ValueError, match="was not written by a worker of this job"):
        worker.stage()
