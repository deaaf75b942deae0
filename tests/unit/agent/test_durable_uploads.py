"""Staging of a commit that its worker may overwrite at any moment."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elasticstate._native import ControlPage
from elasticstate.agent import durable_uploads
from elasticstate.agent.durable_uploads import (
    NoCommitError,
    Staged,
    StagingSlot,
    TornError,
    stage,
)
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.net.messages import Place
from elasticstate.private import open_directory
from elasticstate.replicas.store import Sealed, Source
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

    @property
    def slot(self) -> StagingSlot:
        return StagingSlot("a:0", OWNER, self.page, (self.fds[1], self.fds[2]))

    def stage(self, first: CommitId | None = None) -> Staged:
        return stage([self.slot], KEY, self.directory, first)

    def train(self) -> None:
        """Enter generation 1, as a worker that may commit at any time."""
        self.page.enter(1)
        self.page.set_place(Place.TRAIN)

    def close(self) -> None:
        for fd in (*self.fds, self.directory):
            os.close(fd)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.close()


def content(staged: Staged) -> set[float]:
    """Return the values of the weight in the staged commits, and close them."""
    values: set[float] = set()
    with os.fdopen(staged.fd, "rb") as file:
        for offset, size in staged.places:
            file.seek(offset)
            data = file.read(size)
            found = durable_uploads.cut(memoryview(data))
            weight = torch.frombuffer(bytearray(data[found.tensors : found.objects]), dtype=torch.float32)
            values.update(weight.tolist())
    return values


def while_copying(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], times: int) -> list[int]:
    """Act in the middle of each copy, at most so often. Return the list of the copies, which grows."""
    lengths: list[int] = []
    plain = durable_uploads.copy_bytes

    def copy(source: int, target: int, offset: int, length: int) -> None:
        plain(source, target, offset, length // 2)
        if len(lengths) < times:
            act()
        lengths.append(length)
        plain(source, target, offset, length)

    monkeypatch.setattr(durable_uploads, "copy_bytes", copy)
    return lengths


def test_a_slot_without_a_commit_has_nothing_to_stage(worker: Worker) -> None:
    with pytest.raises(NoCommitError, match="a:0 holds no commit"):
        worker.stage()


def test_the_newest_commit_is_staged(worker: Worker) -> None:
    worker.commit()
    worker.commit()
    staged = worker.stage()
    assert staged.commit == CommitId(1, 2)
    assert content(staged) == {2.0}
    assert not list(worker.folder.glob("durable*")), "the staged file has no name"


def test_a_commit_that_is_overwritten_is_staged_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.commit()

    def two_commits() -> None:
        worker.commit()
        worker.commit()

    lengths = while_copying(monkeypatch, two_commits, times=2)
    staged = worker.stage()
    assert len(lengths) == 3
    assert staged.commit == CommitId(1, 5)
    assert content(staged) == {5.0}


def test_one_commit_beside_the_copy_does_not_matter(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.commit()
    lengths = while_copying(monkeypatch, worker.commit, times=1)
    assert content(worker.stage()) == {1.0}
    assert len(lengths) == 1


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
    assert len(os.listdir("/proc/self/fd")) <= before


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


# ------------------------------------------------------------------------------------- one commit of several slots


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    made = Worker(tmp_path / "a"), Worker(tmp_path / "b")
    yield made
    for worker in made:
        worker.close()


def test_a_commit_that_all_slots_hold_is_staged_once_for_each(workers: tuple[Worker, Worker]) -> None:
    for worker in workers:
        worker.commit()
        worker.commit()
    workers[1].commit()  # one is a commit ahead
    staged = stage([worker.slot for worker in workers], KEY, workers[0].directory, CommitId(1, 2))
    assert staged.commit == CommitId(1, 2)
    assert len(staged.places) == 2
    assert content(staged) == {2.0}


def test_workers_that_commit_all_the_time_are_met_at_a_commit_to_come(workers: tuple[Worker, Worker]) -> None:
    first = CommitId(1, 60)
    waiting: set[int] = set()  # threads that wait for this commit
    both_wait = threading.Event()

    def go_on() -> bool:
        waiting.add(threading.get_ident())
        if len(waiting) == len(workers):
            both_wait.set()
        return True

    def commit_every_second_tick(worker: Worker) -> None:
        worker.tick = 1
        while worker.tick < first.tick:
            if worker.tick + 2 >= first.tick and not both_wait.wait(60.0):
                return  # no commit is met
            worker.tick += 1
            worker.commit()

    for worker in workers:
        worker.train()
    threads = [threading.Thread(target=commit_every_second_tick, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    staged = stage([worker.slot for worker in workers], KEY, workers[0].directory, first, go_on)
    for thread in threads:
        thread.join()
    assert staged.commit == CommitId(1, first.tick + 1), "the first commit from there on"
    assert content(staged) == {float(staged.commit.tick)}


def test_a_commit_that_is_gone_is_an_error(worker: Worker) -> None:
    for _ in range(3):
        worker.commit()
    with pytest.raises(TornError, match="newer commits than"):
        worker.stage(CommitId(1, 1))


def test_a_worker_that_has_left_makes_no_commit_to_come(worker: Worker) -> None:
    worker.train()
    worker.commit()
    worker.page.set_place(Place.GATE)
    with pytest.raises(NoCommitError, match="a:0 does not make commit"):
        worker.stage(CommitId(1, 2))


def test_a_kept_copy_is_staged_for_a_slot_of_another_host(tmp_path: Path, worker: Worker) -> None:
    worker.commit()
    seal = worker.page.sealed(0, OWNER)
    assert seal is not None
    sealed = Sealed(SlotId("a", 0), CommitId(1, 1), 0, *seal[2:])
    buffer = worker.open(0).numpy().data
    slot = StagingSlot("a:0", OWNER, None, None, lambda commit: Source(sealed, buffer))
    assert content(stage([slot], KEY, worker.directory, CommitId(1, 1))) == {1.0}
    slot = StagingSlot("a:0", OWNER, None, None)
    with pytest.raises(NoCommitError, match="this host keeps no copy of commit"):
        stage([slot], KEY, worker.directory, CommitId(1, 1))
