"""Reading of copies from a storage that hangs, and from URLs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from elasticstate.durable.durable_storage import absolute, open_storage, refuse
from elasticstate.durable.parts import PartReader
from elasticstate.durable.stored_copies import (
    BLOCK_BYTES,
    FULL,
    LIBRARY,
    MANIFEST,
    STORAGE,
    DamagedCopyError,
    IncompleteCopyError,
    StorageHangsError,
    StoredCopies,
    copy_name,
    failure_of,
)
from elasticstate.durable.upload import upload
from tests.kit.durable import Sent, commit_of, order

COMMIT = commit_of({"weight": torch.arange(5_000_000, dtype=torch.float32), "step": 1})


def save(place: str, number: int = 1) -> str:
    upload(order(number, COMMIT, place=place, keep=2), memoryview(COMMIT), open_storage(place), Sent())
    return copy_name(number)


def read(copies: StoredCopies, name: str) -> bytes:
    part = copies.manifest(name).parts[0]
    return copies.file(name, part.head) + b"".join(copies.data(name, part)) + copies.file(name, part.objects)


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


def test_a_url_is_read_and_written(memory: str) -> None:
    assert StoredCopies(memory, 5.0).names() == []
    for number in range(4):
        save(memory, number)
    copies = StoredCopies(memory, 5.0)
    assert copies.names() == [copy_name(3), copy_name(2)]
    assert read(copies, copy_name(3)) == COMMIT
    fsspec.filesystem("memory").rm_file(f"/bucket/run/{copy_name(3)}/{MANIFEST}")
    with pytest.raises(IncompleteCopyError):
        copies.manifest(copy_name(3))
    assert read(copies, copy_name(2)) == COMMIT


class HangingFileSystem(MemoryFileSystem):
    """A storage that hangs whenever a manifest is opened, until it is released."""

    protocol = "hangs"
    released = threading.Event()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if path.endswith(MANIFEST) and mode == "rb":
            self.released.wait()
        return super()._open(path, mode, **options)


@pytest.fixture
def hanging() -> Iterator[str]:
    """A copy in a storage that hangs."""
    fsspec.register_implementation("hangs", HangingFileSystem, clobber=True)
    HangingFileSystem.released.set()
    save("hangs://bucket/run")
    HangingFileSystem.released.clear()
    yield "hangs://bucket/run"
    HangingFileSystem.released.set()
    for thread in threading.enumerate():
        if thread.name == "elasticstate-durable-read":
            thread.join(10)
            assert not thread.is_alive()
    HangingFileSystem.store.clear()


def test_a_storage_that_hangs_is_given_up(hanging: str) -> None:
    copies = StoredCopies(hanging, 0.3)
    with pytest.raises(StorageHangsError, match=r"no progress within --durable-timeout of 0.3 s"):
        copies.manifest(copy_name(1))


def test_the_caller_may_give_up_at_any_time(hanging: str) -> None:
    def check() -> None:
        if is_over.is_set():
            raise KeyError("the generation has ended")

    is_over = threading.Event()
    copies = StoredCopies(hanging, 60.0, check)
    assert copies.names() == [copy_name(1)]
    is_over.set()
    with pytest.raises(KeyError):
        copies.manifest(copy_name(1))


def test_ranges_of_a_commit_are_read_and_verified(tmp_path: Path) -> None:
    name = save(str(tmp_path))
    copies = StoredCopies(str(tmp_path), 5.0)
    part = copies.manifest(name).parts[0]
    reader = PartReader(copies, name, part)
    assert reader.length == len(COMMIT)
    end = len(COMMIT)
    wanted = [(0, end), (end - 3, end), (8, 20), (BLOCK_BYTES - 5, 2 * BLOCK_BYTES), (5000, 5000), (90_000, 90_008)]
    places = [bytearray(high - low) for low, high in wanted]
    reader.read_into([(low, memoryview(place)) for (low, _), place in zip(wanted, places, strict=True)])
    assert [bytes(place) for place in places] == [COMMIT[low:high] for low, high in wanted]
    with pytest.raises(DamagedCopyError, match="too short"):
        reader.read_into([(end - 1, memoryview(bytearray(2)))])
    tensors = tmp_path / name / "part-1.safetensors"
    content = bytearray(tensors.read_bytes())
    content[part.data_at + BLOCK_BYTES + 7] ^= 1
    tensors.write_bytes(content)
    first = bytearray(100)
    reader.read_into([(part.head.bytes, memoryview(first))])  # in block 0, which is intact
    with pytest.raises(DamagedCopyError, match="block 1"):
        reader.read_into([(part.head.bytes + BLOCK_BYTES, memoryview(first))])


def test_damage_is_found(tmp_path: Path) -> None:
    name = save(str(tmp_path))
    for file in sorted((tmp_path / name).iterdir()):
        content = file.read_bytes()
        for at in (0, len(content) // 2, len(content) - 2):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(DamagedCopyError):
                read(StoredCopies(str(tmp_path), 5.0), name)
        file.write_bytes(content)
    assert read(StoredCopies(str(tmp_path), 5.0), name) == COMMIT


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    monkeypatch.chdir(tmp_path)
    assert absolute("copies") == absolute(f"file://{tmp_path}/copies") == str(tmp_path / "copies")
    assert absolute("s3://bucket/run") == "s3://bucket/run"
    assert refuse("copies") == refuse("memory://x") == refuse("s3://bucket/run") == ""
    assert refuse("nothing://x") == "fsspec knows no protocol 'nothing'. Name a path, or a URL like s3://bucket/folder"
    assert "gcsfs" in refuse("gs://bucket/run").lower()


def test_kinds_of_failures() -> None:
    assert failure_of(OSError(28, "No space left on device")) == (FULL, "[Errno 28] No space left on device")
    assert failure_of(ModuleNotFoundError("No module named 's3fs'")) == (LIBRARY, "No module named 's3fs'")
    assert failure_of(RuntimeError("Access\n Denied")) == (STORAGE, "RuntimeError: Access Denied")
