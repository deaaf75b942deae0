"""Durable copies in a directory that another user can write to: planted links, pickles, sizes and offsets."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import resource
import shutil
import stat
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from elasticstate import private
from elasticstate.cli import main
from elasticstate.durable.durable_storage import open_storage
from elasticstate.durable.stored_copies import (
    MANIFEST,
    DamagedCopyError,
    UntrustedCopyError,
    copy_name,
    crc32c,
    read_manifest,
    remove_old,
)
from elasticstate.durable.upload import StagedPart, upload
from elasticstate.private import PlantedFileError
from tests.kit.durable import Sent, commit_of, order, shard_file
from tests.kit.job import Job
from tests.kit.second_user import NOBODY, Payload, as_nobody, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

COMMIT = commit_of({"weight": torch.arange(8.0)})
FAR = 4_000_000_000_000  # of a copy that is newer than all others: in the year 2096


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that all users can write to."""
    path = Path("/tmp", f"es-{uuid.uuid4().hex[:12]}")
    path.mkdir()
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def save(place: Path, number: int, commit: bytes = COMMIT, keep: int = 1) -> Path:
    upload(order(number, commit, keep, place=str(place)), memoryview(commit), open_storage(str(place)), Sent())
    return place / copy_name(number)


def as_planted(copy: Path) -> Path:
    """Let a copy belong to another user."""
    for path in (copy, *copy.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    return copy


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def test_nothing_is_deleted_but_what_was_written(public: Path) -> None:
    precious, notes = public.parent / f"{public.name}-precious", public / "notes"
    for folder in (precious, notes):
        folder.mkdir(0o755)
        (folder / "part-1.txt").write_text("precious")
        (folder / "thesis").write_text("precious")
    try:
        as_nobody("ln", "-s", precious, public / copy_name(1)).check_returncode()
        as_nobody("mv", notes, public / copy_name(2)).check_returncode()
        planted = as_planted(save(public, 3))
        save(public, 4)
        storage = open_storage(str(public))
        with pytest.raises(OSError, match="not empty"):
            remove_old(storage, 1, copy_name(4))
        assert (precious / "part-1.txt").read_text() == (precious / "thesis").read_text() == "precious"
        assert (public / copy_name(2) / "thesis").read_text() == "precious"
        assert (planted / MANIFEST).exists(), "copies of others are theirs to remove"
        with pytest.raises(UntrustedCopyError, match="symbolic link"):
            read_manifest(storage, copy_name(1))
    finally:
        shutil.rmtree(precious)


def test_nothing_is_written_into_what_others_have_made(public: Path) -> None:
    victim = public / "victim"
    victim.write_text("precious")
    as_nobody("mkdir", "-m", "777", public / copy_name(1)).check_returncode()
    as_nobody("ln", "-s", victim, public / copy_name(1) / "part-1.head").check_returncode()
    with pytest.raises(PlantedFileError, match=f"belongs to user {NOBODY}"):
        save(public, 1)
    own = save(public, 2)
    (own / "part-1.head").unlink()
    (own / "part-1.head").symlink_to(victim)
    save(public, 2)
    as_nobody("ln", "-s", victim, public / "out.new").check_returncode()
    assert export(public, "-o", public / "out") == 0
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077], ids=lambda umask: f"{umask:04o}")
def test_other_users_cannot_write_to_copies_under_any_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        copy = save(tmp_path / "new" / "run", 1)
        assert export(copy, "-o", tmp_path / "out") == 0
    finally:
        os.umask(before)
    for path in (copy.parent.parent, copy.parent, copy, *copy.iterdir(), tmp_path / "out"):
        wanted = (0o755 if path.is_dir() else 0o644) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_copy_that_others_can_change_is_refused(public: Path) -> None:
    copy = save(public, 1)
    storage = open_storage(str(public))
    read_manifest(storage, copy.name)
    for path in (copy, copy / "part-1.objects"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        with pytest.raises(UntrustedCopyError, match=r"other users can change .* run chmod -R go-w"):
            read_manifest(storage, copy.name)
        path.chmod(mode)
    read_manifest(storage, copy.name)


def test_a_job_runs_no_pickle_of_another_user(tmp_path: Path, public: Path) -> None:
    marker, refused, first, second = public / "executed", *(tmp_path / name for name in ("refused", "first", "second"))
    for folder in (refused, first, second):
        folder.mkdir()
    options = ("-np", "1", "--durable-dir", str(public), "--reset-limit", "0")
    forged = as_planted(save(public, FAR, commit_of({"step": Payload(marker)}, pickle.dumps(Payload(marker)))))
    with Job(refused, *options, steps=3) as job:
        job.finish(status=3)
    assert f"{forged} belongs to user {NOBODY}, not to this user (0)" in job.output
    assert "name another directory to begin anew" in job.output
    aside = public / "aside"
    forged.rename(aside)
    with Job(first, *options, steps=3) as job:
        job.finish()
    aside.rename(forged)
    with Job(second, *options, steps=5) as job:
        job.finish()
        assert [line["step"] for line in job.log("enter")] == [3], "planted copies are passed over"
    assert not marker.exists()


def test_copies_of_others_are_exported_if_they_are_named(public: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own, planted, out = save(public, 1), as_planted(save(public, 2, keep=2)), public / "out"
    assert export(public, "-o", out) == 0
    said = capfd.readouterr()
    assert f"{planted.name} is skipped" in said.err
    assert own.name in said.out
    assert export(planted, "-o", out) == 0
    os.chown(public, NOBODY, NOBODY)
    capfd.readouterr()
    assert export(public, "-o", out) == 0
    assert planted.name in capfd.readouterr().out, "the owner of the directory may export to others"


def test_a_hostile_copy_takes_little_memory_and_is_refused(public: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = save(public, 1)
    manifest = (copy / MANIFEST).read_bytes()
    os.truncate(copy / MANIFEST, 6 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert export(copy, "-o", public / "out") == 1
    assert "manifest.json has 6442450944 bytes" in capfd.readouterr().err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"
    (copy / MANIFEST).unlink()
    os.mkfifo(copy / MANIFEST)
    with pytest.raises(UntrustedCopyError, match="no regular file"):
        read_manifest(open_storage(str(public)), copy.name)
    (copy / MANIFEST).unlink()
    for change in ({"data_at": 1 << 40}, {"data_bytes": -1}, {"blocks_crc32c": [1] * 1000}):
        (copy / MANIFEST).write_bytes(changed(manifest, change))
        with pytest.raises(DamagedCopyError, match=r"part-1\.safetensors has"):
            read_manifest(open_storage(str(public)), copy.name)


def changed(manifest: bytes, change: dict[str, Any]) -> bytes:
    content = json.loads(manifest)["copy"]
    content["parts"][0].update(change)
    text = json.dumps(content)
    return f'{{"crc32c":{crc32c(text.encode())},"copy":{text}}}\n'.encode()


TENSORS = {"a": (torch.arange(4.0), (0,)), "b": (torch.arange(4.0), (0,))}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"data_offsets": [80, 96]', '"data_offsets": [72, 88]', "overlap"),
        ('"data_offsets": [64, 80]', '"data_offsets": [99999999, 99999999]', "cannot be at bytes"),
        ('"shape": [4]', '"shape": [4611686018427387904]', "cannot be at bytes"),
        ('"shape": [4]', '"shape": [-2, -2]', "cannot be at bytes|damaged"),
        ('\\"saved_offsets\\": [0]', '\\"saved_offsets\\": [-1]', "wrong offsets"),
        ('\\"saved_offsets\\": [0]', '\\"saved_offsets\\": [4611686018427387904]', "missing, or overlap"),
        ('\\"saved_offsets\\": [0]', '\\"saved_offsets\\": 0', "damaged"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    old: str, new: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commit = shard_file(TENSORS)
    text = commit[8 : 8 + int.from_bytes(commit[:8], "little")].decode()
    assert old in text
    hostile = text.rstrip().replace(old, new, 1).ljust(len(text)).encode()
    staged = commit[:8] + hostile + commit[8 + len(text) :]

    given = replace(order(1, staged, place=str(tmp_path)), parts=(StagedPart(1, 5, 0, len(staged)),))
    upload(given, memoryview(staged), open_storage(str(tmp_path)), Sent())
    assert export(tmp_path, "-o", tmp_path / "out") == 1
    assert re.search(why, capfd.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_file_system_that_gives_all_files_one_owner_can_be_used(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS with root_squash: the files of this user belong to another one."""
    monkeypatch.setattr(private, "_looks", {})

    def run() -> int:
        ctypes.CDLL(None).setfsuid(NOBODY)  # of this thread
        copy = save(public, 1)
        assert copy.stat().st_uid == NOBODY != os.geteuid()
        return len(read_manifest(open_storage(str(public)), copy.name).parts)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == 1
    assert not list(public.glob(".elasticstate*"))
