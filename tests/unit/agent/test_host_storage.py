"""Allocation of commit storage: all blocks are reserved before anybody maps them, or an error names the shortage."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticstate.agent.host_storage import HostStorage, StorageAllocator, rounded_up
from elasticstate.commits import CommitDirectory, buffer_file, grow
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CommitStorageError
from elasticstate.machine import format_bytes
from elasticstate.replicas.store import ReplicaStore
from tests.kit.commits import JOB, KEY, put

MB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_a_file_grows_with_all_its_blocks_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    assert grow(fd, 3 * MB) == 3 * MB
    assert path.stat().st_size == 3 * MB <= path.stat().st_blocks * 512
    path.write_bytes(b"x" * 3 * MB)
    assert grow(fd, 4 * MB) == 4 * MB
    assert path.read_bytes() == b"x" * 3 * MB + bytes(MB)
    assert grow(fd, MB) == 4 * MB, "never shorter"
    os.close(fd)


def test_a_file_that_cannot_grow_is_as_it_was(small: Path) -> None:
    path = small / "buffer"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    grow(fd, 2 * MB)
    path.write_bytes(b"x" * 2 * MB)
    before = free(small)
    with pytest.raises(OSError, match="No space left"):
        grow(fd, 20 * MB)
    os.close(fd)
    assert free(small) == before, "what was taken is given back"
    assert path.read_bytes() == b"x" * 2 * MB


def test_sizes_are_rounded_up_a_little() -> None:
    for size in (1, 1 << 16, (1 << 16) + 1, 10 * MB, 1_000_000_007):
        assert size <= rounded_up(size) <= max(size * 17 / 16, 1 << 16, size + (1 << 16))
        assert rounded_up(rounded_up(size)) == rounded_up(size)
    assert len({rounded_up(size) for size in range(1, 64 * MB, 4096)}) < 150


def test_sizes_in_words() -> None:
    assert [format_bytes(n) for n in (999, 1000, 3_200_000, 12_340_000_000)] == [
        "999 bytes",
        "1.0 kB",
        "3.2 MB",
        "12.3 GB",
    ]


class Host:
    """The commit storage of a host with two workers, and its log lines."""

    def __init__(self, base: Path) -> None:
        self.directory = CommitDirectory(str(base), "c0ffee", "h", str(base), "/socket", 5.0, 300.0)
        self.said: list[str] = []
        self.sealed: set[int] = set()
        self.storage = HostStorage(self.directory, "c0ffee", "h", self.said.append)
        self.room = StorageAllocator(self.storage, lambda: 2)

    def size(self, slot: int, index: int) -> int:
        return (self.directory.path / buffer_file(slot, index)).stat().st_size

    def make(self, *sizes: tuple[int, int, int]) -> list[tuple[int, str]]:
        async def ask() -> list[tuple[int, str]]:
            return list(await asyncio.gather(*(self.room.make(*size, self.sealed.__contains__) for size in sizes)))

        return asyncio.run(ask())

    def close(self) -> None:
        self.room.close()
        self.storage.close()
        self.directory.remove()


def test_the_host_says_what_commits_take_and_again_when_it_has_grown(small: Path) -> None:
    host = Host(small)
    assert host.make((0, 0, MB), (0, 1, MB), (1, 0, MB), (1, 1, MB)) == [(MB, "")] * 4
    assert host.size(1, 1) == MB
    host.room.expect(0, MB // 2, 0)
    assert host.said == [], "attached values and the state of optimizers may come before the first tick"
    host.room.expect(0, MB, 0)
    host.room.begin_ticks()
    host.room.begin_ticks()
    assert host.said == [f"commits need 4.2 MB on this host (2 workers x 2 x 1.0 MB); 8.4 MB are free in {small}"]
    host.room.expect(1, 9 * MB // 8, 0)
    assert len(host.said) == 1, "little more is no news"
    host.room.expect(1, 3 * MB // 2, 0)
    assert [line[:50] for line in host.said[1:]] == ["commits now need 6.3 MB on this host (2 workers x "]
    host.close()


def test_the_need_has_the_state_that_optimizers_will_have(small: Path) -> None:
    host = Host(small)
    host.room.expect(0, MB // 2, MB)
    host.room.begin_ticks()
    assert host.said == [f"commits need 6.3 MB on this host (2 workers x 2 x 1.6 MB); 8.4 MB are free in {small}"]
    host.close()


def test_the_need_is_so_far_if_an_optimizer_is_not_known(small: Path) -> None:
    host = Host(small)
    host.room.expect(0, MB, None)
    host.room.begin_ticks()
    assert "commits need 4.2 MB so far on this host" in host.said[0]
    host.close()


def test_the_need_may_be_more_than_there_is(small: Path) -> None:
    host = Host(small)
    host.room.expect(0, MB, 2 * MB)
    host.room.begin_ticks()
    each = "2 workers x 2 x 3.1 MB"
    assert host.said == [f"commits need 12.6 MB on this host ({each}); 8.4 MB are free in {small}, which is too little"]
    host.close()


def test_the_need_counts_the_copies_for_replicas(small: Path) -> None:
    host = Host(small)
    host.room.expect(0, MB // 2, 0)
    host.room.begin_ticks()
    host.room.keep_copies(4)  # of two workers, on this host and on another one
    host.room.keep_copies(4)
    each = "2 workers x 6 x 524.3 kB, 4 of them for --replicas"
    assert host.said[1:] == [f"commits now need 6.3 MB on this host ({each}); 8.4 MB are free in {small}"]
    host.close()


def test_more_than_there_is_is_refused_at_once(small: Path) -> None:
    host = Host(small)
    ((length, error),) = host.make((0, 0, 3 * MB))
    assert length == 0
    assert error == (
        f"commits do not fit into --commit-dir {small} of host h: they need 12.6 MB more (two buffers of 3.1 MB for "
        f"each of 2), and 8.4 MB are free. Make the state smaller, choose another --commit-dir, or enlarge this "
        f"one (mount -o remount,size=... {small}; docker run --shm-size=...)"
    )
    assert not any(path.stat().st_size for path in host.directory.path.glob("*.safetensors"))
    assert host.make((0, 0, MB)) == [(MB, "")], "a smaller state fits"
    host.close()


def test_a_worker_that_would_stop_the_others_in_vain_is_refused_before_it_starts(small: Path) -> None:
    host = Host(small)
    assert host.make((0, 0, 3 * MB // 2), (0, 1, 3 * MB // 2)) == [(3 * MB // 2, "")] * 2
    asyncio.run(host.room.check_fits(0, 3 * MB // 2))
    asyncio.run(host.room.check_fits(1, 2 * MB))
    with pytest.raises(CommitStorageError, match=r"do not fit .*two buffers of 3\.1 MB for each of 3"):
        asyncio.run(host.room.check_fits(1, 3 * MB))
    host.close()


def test_a_buffer_that_carries_a_seal_is_never_changed(small: Path) -> None:
    host = Host(small)
    host.make((0, 0, MB // 2), (0, 1, MB // 2))
    host.sealed.add(0)
    assert host.make((0, 0, MB)) == [(0, "buffer 0 of slot 0 carries a sealed commit")]
    asyncio.run(host.room.reserve(0, MB, host.sealed.__contains__))
    lengths = [host.size(0, index) for index in (0, 1)]
    assert lengths == [MB // 2, MB]
    host.close()


def test_somebody_else_may_take_the_room_meanwhile(small: Path) -> None:
    host = Host(small)
    assert host.make((0, 0, MB)) == [(MB, "")]
    (small / "other").write_bytes(bytes(7 * MB - 65536))
    ((length, error),) = host.make((0, 1, MB))
    assert length == 0
    assert "they need 3.1 MB more" in error
    host.close()


def test_a_spare_file_of_the_copies_makes_way_for_a_buffer(small: Path) -> None:
    host = Host(small)
    store = ReplicaStore(host.directory.fd, JOB, KEY)
    for tick in (1, 2):
        put(store, SlotId("a", 0), CommitId(1, tick), bytes(3 * MB))
    store.forget(CommitId(1, 2))
    assert "are free" in host.make((0, 0, MB))[0][1], "one copy and one spare file leave no space"
    host.room.close()
    host.room = StorageAllocator(host.storage, lambda: 2, store)
    assert host.make((0, 0, MB)) == [(MB, "")]
    assert store.kept() == [(SlotId("a", 0), CommitId(1, 2))]
    store.close()
    host.close()
