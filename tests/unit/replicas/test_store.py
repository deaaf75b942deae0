"""The store of kept copies: its files, which the next agent takes over, damage, full file systems, random programs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elasticstate.commits import CommitDirectory, remove_dead
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError
from elasticstate.replicas.store import ReplicaStore
from tests.kit.commits import JOB, KEY, Host, content, put, seal_of

C1, C2 = CommitId(1, 1), CommitId(1, 2)
SLOT = SlotId("a", 0)


@contextmanager
def store_in(path: Path) -> Iterator[ReplicaStore]:
    fd = os.open(path, os.O_RDONLY)
    store = ReplicaStore(fd, JOB, KEY)
    os.close(fd)
    try:
        yield store
    finally:
        store.close()


def get(store: ReplicaStore, slot: SlotId, commit: CommitId) -> bytes | None:
    source = store.open(slot, commit)
    if source is None:
        return None
    try:
        return source.read(0, source.sealed.length)
    finally:
        source.close()


def test_files_are_private_and_a_whole_safetensors_file(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with store_in(tmp_path) as store:
            data = put(store, SLOT, C1, b"x" * 5000)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "copies").iterdir()}
    assert stat.S_IMODE((tmp_path / "copies").stat().st_mode) == 0o700
    assert len(modes) == 2
    assert set(modes.values()) == {0o600}
    (file,) = (tmp_path / "copies").glob("*.safetensors")
    assert file.read_bytes() == data + bytes(512), "the header names all of them"


def test_the_next_agent_takes_over_copies_and_drops_damaged_ones(tmp_path: Path) -> None:
    with ExitStack() as stack:
        a = stack.enter_context(Host("a", tmp_path))
        data = {slot: put(a.copies.store, SlotId("a", slot), C1, b"x" * 9000) for slot in range(3)}
        put(a.copies.store, SlotId("a", 3), C1, b"x" * 9000, most_bytes=5000)
    files = sorted((tmp_path / "a" / "copies").glob("*.safetensors"))
    with files[1].open("r+b") as file:
        file.seek(6000)
        file.write(b"damage")
    (tmp_path / "a" / "copies" / "planted.seal").write_bytes(bytes(100))
    with Host("a", tmp_path) as a:
        what, damaged, commit = a.report()
        assert (what, commit) == ("dropped", C1)
        kept = {SlotId("a", slot) for slot in range(3)} - {damaged}
        assert {slot for slot, _ in a.copies.store.kept()} == kept
        assert len(a.files()) == 4, "the damaged, the incomplete and the planted files are gone"
        for slot in kept:
            with open_copy(a, slot) as found:
                assert found == data[slot.slot]
        with pytest.raises(CopyError, match="host a has no commit"), open_copy(a, damaged):
            pass


@contextmanager
def open_copy(host: Host, slot: SlotId) -> Iterator[bytes]:
    source = host.copies.open(slot, C1)
    yield source.read(0, source.sealed.length)
    source.close()


def test_copies_of_another_job_are_not_taken_over(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        put(store, SLOT, C1, b"x" * 5000)
    fd = os.open(tmp_path, os.O_RDONLY)
    other = ReplicaStore(fd, JOB, b"o" * 32)
    os.close(fd)
    assert other.kept() == []
    other.close()
    assert list((tmp_path / "copies").iterdir()) == []


def test_content_that_no_process_of_the_job_has_sealed_is_refused(tmp_path: Path) -> None:
    """The checksum is correct, and the tag is not: the objects are not those that the worker has pickled."""
    good, length = content(b"x" * 5000, b"objects")
    evil, _ = content(b"x" * 5000, b"malware")
    seal = seal_of(SLOT, C1, evil, length)
    tag = seal_of(SLOT, C1, good, length).tag
    with store_in(tmp_path) as store:
        incoming = store.begin(type(seal)(SLOT, C1, 0, seal.layout, length, seal.checksum, tag), len(evil))
        assert incoming is not None
        with incoming.owned(lambda: None, lambda: True):
            incoming.write(memoryview(evil)[:length])
            assert incoming.is_good()
            with pytest.raises(CopyError, match="checksum is wrong"):
                store.finish(incoming)
        assert store.kept() == []


def test_a_file_is_used_again_only_when_nothing_reads_it(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        first = put(store, SLOT, C1, b"1" * 9000)
        reader = store.open(SLOT, C1)
        assert reader is not None
        for tick in range(2, 6):
            put(store, SLOT, CommitId(1, tick), bytes([tick]) * (9000 + 1000 * (tick % 2)))
            store.forget(CommitId(1, tick))
            assert reader.read(0, len(first)) == first
        reader.close()
        names = os.listdir(tmp_path / "copies")
        assert sum(name.endswith(".part") for name in names) == 1
        assert store.release_spare()
        assert len(os.listdir(tmp_path / "copies")) == 2


def test_a_file_that_was_given_to_another_process_is_not_used_again_nor_by_the_next_agent(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        first = put(store, SLOT, C1, b"1" * 9000)
        assert store.share(SLOT, C2) is None
        found = store.share(SLOT, C1)
        assert found is not None
    fd, content_of_first = found
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        with store_in(tmp_path) as store:
            assert store.share(SLOT, C1) is None, "not verified"
            assert store.verify(SLOT, C1, lambda: True)
            put(store, SLOT, C2, b"2" * 9000)
            store.forget(C2)
            assert not store.release_spare()
            put(store, SLOT, CommitId(1, 3), b"3" * 9000)
        assert os.pread(fd, len(first), 0) == first
        assert content_of_first[1] == len(first)
    finally:
        os.close(fd)


def test_copies_survive_the_loss_of_their_names(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        data = put(store, SLOT, C1, b"x" * 5000)
        shutil.rmtree(tmp_path / "copies")
        assert get(store, SLOT, C1) == data
        newer = put(store, SLOT, C2, b"y" * 5000)
        store.forget(C2)
        assert (get(store, SLOT, C1), get(store, SLOT, C2)) == (None, newer)
        (tmp_path / "new").mkdir()
        fd = os.open(tmp_path / "new", os.O_RDONLY)
        store.move_to(fd)
        os.close(fd)
        put(store, SLOT, CommitId(1, 3), b"z")
    with store_in(tmp_path / "new") as store:
        assert store.kept() == [(SLOT, CommitId(1, 3))]


def test_copies_are_removed_with_the_commit_directory(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir(mode=0o700)
    for removes_stale in (False, True):
        directory = CommitDirectory(str(tmp_path), JOB, "a", str(tmp_path / "job"), "mark", 1.0, 0.0)
        store = ReplicaStore(directory.fd, JOB, KEY)
        put(store, SLOT, C1, b"x" * 5000)
        store.close()
        assert (directory.path / "copies").exists()
        if removes_stale:  # as another agent does, when all processes of the job are dead
            directory.close()
            (tmp_path / "job" / "id").write_text("another job")
            assert remove_dead(str(tmp_path)) == [str(directory.path)]
        else:
            directory.remove()
        assert not directory.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_a_full_file_system_is_a_refusal_and_leaves_the_space_to_others(tmp_path: Path) -> None:
    with ExitStack() as stack:
        small = tmp_path / "b"
        small.mkdir(mode=0o700)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "none", small], check=False).returncode:
            pytest.skip("this sandbox forbids mounts")
        stack.callback(subprocess.run, ["umount", small], check=True)
        a, b = (stack.enter_context(Host(name, tmp_path)) for name in "ab")
        worker = a.worker()
        worker.commit(C1, os.urandom(16 << 20))
        a.copies.replicate(C1, {0: [b.target]})
        assert a.report() == ("kept", worker.slot, C1)
        assert a.report() == ("dropped", worker.slot, C1), "the driver must end this replication"
        ((keeper, reason),) = a.reasons
        assert keeper == "b"
        assert "do not fit into the commit directory" in reason
        assert os.statvfs(small).f_bfree * os.statvfs(small).f_frsize > 11 << 20, "the reserved space is free again"
        worker.commit(C2, b"x" * (5 << 20))
        a.copies.replicate(C2, {0: [b.target]})
        assert b.report() == ("kept", worker.slot, C2)


# --------------------------------------------------------------------------------------------------- random programs

slots = st.sampled_from([SlotId("a", 0), SlotId("a", 1), SlotId("b", 0)])
ticks = st.integers(1, 6)


class Programs(RuleBasedStateMachine):
    """Random programs over a store. The oracle is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-copies-"))
        self.path.chmod(0o700)
        self.expected: dict[tuple[SlotId, CommitId], bytes] = {}
        self.least = 0  # of the ticks that are not forgotten
        self.store = self._open()

    def _open(self) -> ReplicaStore:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return ReplicaStore(fd, JOB, KEY)
        finally:
            os.close(fd)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)

    @rule(slot=slots, tick=ticks, size=st.integers(0, 20000), is_complete=st.booleans())
    def push(self, slot: SlotId, tick: int, size: int, is_complete: bool) -> None:
        commit = CommitId(1, tick)
        tensors = bytes([tick, slot.slot]) * size
        if (slot, commit) in self.expected:
            tensors = self.expected[slot, commit][4160:-7]  # one id never has two contents
        with suppress(CopyError):
            data = put(self.store, slot, commit, tensors, None if is_complete else 3000)
            if is_complete:
                self.expected[slot, commit] = data
            return
        assert tick < self.least, "a refusal needs a cause, and an incomplete copy of a newer commit is none"

    @rule(tick=ticks)
    def forget(self, tick: int) -> None:
        self.store.forget(CommitId(1, tick))
        self.least = max(self.least, tick)
        self.expected = {key: data for key, data in self.expected.items() if key[1].tick >= tick}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store, self.least = self._open(), 0
        assert sorted(self.store.unverified()) == sorted(self.expected)
        for key in self.store.unverified():
            assert self.store.verify(*key, lambda: True)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 100), at=st.integers(0, 1 << 20))
    def damage_and_reopen(self, choice: int, at: int) -> None:
        self.store.close()
        key = sorted(self.expected)[choice % len(self.expected)]
        self.store = self._open()
        memory = self.store._kept[key].file.memory()
        memory[at % len(self.expected[key])] ^= 0x10
        self.least = 0
        damaged = [found for found in self.store.unverified() if not self.store.verify(*found, lambda: True)]
        assert damaged == [key]
        del self.expected[key]

    @invariant()
    def content_is_right(self) -> None:
        assert self.store.kept() == sorted(self.expected)
        for key, data in self.expected.items():
            assert get(self.store, *key) == data


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
