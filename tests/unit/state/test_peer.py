"""Commits of another worker of the same host: what a newcomer copies is whole, or it copies nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError
from elasticstate.state import peer, rng
from elasticstate.state.peer import PeerReader, PeerStorage
from elasticstate.state.snapshot import PrivateStorage, Snapshot

Storage = Callable[..., Any]
COMMIT = CommitId(3, 7)


class Host:
    """The agent of the only other slot, slot 5."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.asked: list[int] = []
        self.is_inhabited = True

    def peer(self, slot: int) -> PeerStorage | None:
        self.asked.append(slot)
        if not self.is_inhabited:
            return None
        fds = [os.open(path, os.O_RDWR) for path in (self.storage.control, *self.storage.files)]
        return PeerStorage(5, self.storage.owner, self.storage.key, fds[0], fds[1:])


@pytest.fixture
def storage(file_storage: Storage) -> Any:
    return file_storage()


def write(storage: Any, commit: CommitId = COMMIT, value: float = 1.0) -> Snapshot:
    snapshot = Snapshot(storage)
    snapshot.write({"w": torch.full((1000,), value), "epoch": 4}, rng.capture(), commit)
    return snapshot


def test_the_newest_commit_is_copied_with_a_random_state_of_its_own(storage: Any) -> None:
    torch.manual_seed(11)
    write(storage)
    found = PeerReader(Host(storage).peer).newest()
    assert found is not None
    commit, source = found
    assert commit == COMMIT
    assert source.buffer.is_intact()
    mine = Snapshot(PrivateStorage())
    assert source.copy_to(mine, "host:6#1", 3)
    values = mine.seal_incoming(commit, mine.load_incoming({}))
    assert torch.equal(values["w"], torch.full((1000,), 1.0))
    assert values["epoch"] == 4
    assert mine.read_private(commit) == rng.derived(11, "host:6#1", 3)


def test_nothing_is_found_where_no_worker_has_committed(storage: Any) -> None:
    host = Host(storage)
    assert PeerReader(host.peer).newest() is None
    host.is_inhabited = False
    assert PeerReader(host.peer).newest() is None


def test_a_commit_that_its_owner_overwrites_during_the_copy_is_refused(storage: Any) -> None:
    owner = write(storage)
    found = PeerReader(Host(storage).peer).newest()
    assert found is not None
    for tick in (8, 9):
        owner.write({"w": torch.full((1000,), 2.0), "epoch": 5}, rng.capture(), CommitId(3, tick))
    assert not found[1].copy_to(Snapshot(PrivateStorage()), "host:6#1", 1)


def test_a_damaged_commit_is_not_intact(storage: Any) -> None:
    write(storage)
    found = PeerReader(Host(storage).peer).newest()
    assert found is not None
    for index, file in enumerate(storage.files):
        seal = storage.page.sealed(index, storage.owner)
        if seal is not None:
            memory = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
            memory[seal[3] - 1] ^= 1
    assert not found[1].buffer.is_intact()


def test_a_commit_of_another_job_is_no_commit(storage: Any) -> None:
    write(storage)
    storage.key = b"the key of another job"
    assert PeerReader(Host(storage).peer).newest() is None


def test_waits_for_the_seal_of_the_root(storage: Any) -> None:
    owner = write(storage)
    host = Host(storage)
    reader = PeerReader(host.peer)
    looks = []

    def seal_at_the_third_look() -> None:
        looks.append(1)
        if len(looks) == 3:
            owner.restamp(CommitId(4, 0))

    source = reader.wait_for(5, CommitId(4, 0), seal_at_the_third_look)
    assert source is not None
    assert (len(looks), host.asked) == (3, [5])


def test_a_commit_that_the_root_has_overwritten_is_not_awaited(storage: Any) -> None:
    owner = write(storage)
    for tick in (1, 2):
        owner.write({"x": torch.zeros(3)}, b"", CommitId(4, tick))

    def never() -> None:
        raise AssertionError("the root never seals an older commit")

    assert PeerReader(Host(storage).peer).wait_for(5, CommitId(4, 0), never) is None


def test_the_end_of_the_generation_ends_the_wait(storage: Any) -> None:
    write(storage)

    def over() -> None:
        raise CollectiveError("the generation is over")

    with pytest.raises(CollectiveError):
        PeerReader(Host(storage).peer).wait_for(5, CommitId(4, 0), over)


def test_files_that_the_agent_has_replaced_are_requested_again(storage: Any, tmp_path: Path) -> None:
    write(storage)
    host = Host(storage)
    reader = PeerReader(host.peer)
    assert reader.newest() is not None
    storage.page.set_stale(True)
    host.is_inhabited = False
    assert reader.wait_for(5, COMMIT, lambda: None) is None, "no worker is in the slot"
    assert host.asked == [-1, 5]


def test_the_seed_of_a_random_state() -> None:
    torch.manual_seed(123456789)
    torch.rand(1000)
    assert rng.initial_seed(rng.capture()) == torch.initial_seed() == 123456789


def test_no_name_of_this_module_writes_to_another_worker_s_page() -> None:
    assert not {name for name in vars(peer.SealReader) if name in ("seal", "set_stale", "heartbeat", "enter", "reset")}


@pytest.mark.parametrize("at_once", [False, True])
def test_a_copy_made_ahead_counts_when_the_root_has_stamped_its_commit_anew(storage: Any, at_once: bool) -> None:
    root, mine, start = write(storage), Snapshot(PrivateStorage()), CommitId(4, 0)
    live = torch.zeros(1000)
    copies = PeerReader(Host(storage).peer)
    assert not copies.wait()
    copies.read_ahead(5, mine, "host:6#1", start.generation, {"w": live} if at_once else None)
    assert copies.wait()
    assert torch.equal(live, torch.full((1000,), 1.0 if at_once else 0.0))
    root.restamp(start)
    source = copies.wait_for(5, start, lambda: None)
    assert source is not None
    source.copy_to = None  # type: ignore[assignment,method-assign]  # it is not called
    mine.load_incoming = mine.load_incoming if not at_once else None  # type: ignore[assignment,method-assign]
    incoming = copies.load(source, mine, "host:6#1", start.generation, lambda: {"w": live})
    assert incoming is not None
    assert copies.seconds_ahead > 0
    assert torch.equal(mine.seal_incoming(start, incoming)["w"], torch.full((1000,), 1.0))
    assert mine.newest == start
    mine.verify()
    assert torch.equal(live, torch.full((1000,), 1.0))
    copies.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_copy_made_ahead_of_another_commit_is_made_again(storage: Any, at_once: bool) -> None:
    root, mine, start = write(storage), Snapshot(PrivateStorage()), CommitId(4, 0)
    live = torch.zeros(1000)
    copies = PeerReader(Host(storage).peer)
    copies.read_ahead(5, mine, "host:6#1", start.generation, {"w": live} if at_once else None)
    copies.wait()
    root.write({"w": torch.full((1000,), 2.0), "epoch": 5}, rng.capture(), start)
    source = copies.wait_for(5, start, lambda: None)
    assert source is not None
    incoming = copies.load(source, mine, "host:6#1", start.generation, lambda: {"w": live})
    assert incoming is not None
    assert copies.seconds_ahead == 0, "the copy made ahead is not part of this one"
    assert torch.equal(mine.seal_incoming(start, incoming)["w"], torch.full((1000,), 2.0))
    mine.verify()
    assert torch.equal(live, torch.full((1000,), 2.0))
    copies.close()
