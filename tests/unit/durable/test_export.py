"""StoredCopies are read by torch alone, in a process without elasticstate, and exported to one file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from elasticstate.cli import main
from elasticstate.core.ids import CommitId
from elasticstate.durable.durable_storage import Directory, Files
from elasticstate.durable.parts import write_part
from elasticstate.durable.stored_copies import (
    MANIFEST,
    VERSION,
    DamagedCopyError,
    Manifest,
    ShardedCommitError,
    copy_name,
    encode,
    read_manifest,
)
from elasticstate.durable.upload import StagedPart, UploadOrder, upload
from tests.kit.durable import Sent, commit_of, order, shard_file

READER = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

path, out = sys.argv[1:]
found = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
values = {name: torch.zeros(item.size, dtype=item.properties.dtype) for name, item in found.items()}
dcp.load(values, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
torch.save(values, out)
assert "elasticstate" not in sys.modules
"""
TENSORS: dict[str, Any] = {
    "model.weight": torch.randn(17, 5),
    "model.bf16": torch.randn(3, 3).bfloat16(),
    "model.fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "model.flag": torch.tensor([True, False]),
    "model.scalar": torch.tensor(3.5, dtype=torch.float64),
    "model.empty": torch.empty(0, 4),
    "optimizer.step": torch.arange(7, dtype=torch.int32),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
}


def save(place: Path, values: dict[str, Any], number: int = 1) -> str:
    commit = commit_of(values)
    sent = Sent()
    upload(order(number, commit, place=str(place)), memoryview(commit), Directory(str(place), Files()), sent)
    assert sent.last.is_saved
    return copy_name(number)


def read_by_torch(copy: Path, out: Path) -> dict[str, torch.Tensor]:
    command = [sys.executable, "-I", "-W", "ignore", "-c", READER, str(copy), str(out)]
    subprocess.run(command, check=True, timeout=120)
    found: dict[str, torch.Tensor] = torch.load(out)
    return found


def equal(found: torch.Tensor, value: Any) -> bool:
    value = torch.as_tensor(value)
    if (found.dtype, found.shape) != (value.dtype, value.shape):
        return False
    return found.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))


def save_shards(place: Path, *parts: dict[str, tuple[torch.Tensor, tuple[int, ...]]]) -> str:
    """Save a copy of a sharded state: one part for each digest."""
    storage, name = Directory(str(place), Files()), copy_name(1)
    written = []
    for number, part in enumerate(parts, start=1):
        written.append(write_part(storage, name, number, number, memoryview(shard_file(part)), lambda size: None))
    manifest = Manifest(VERSION, "job", "id", CommitId(3, 4), len(parts), 1.0, tuple(written))
    storage.publish(name, MANIFEST, encode(manifest))
    return name


WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
NORM = torch.randn(6)
SHARDS = [  # rows over two ranks, then columns over two, the norm on both, an empty shard
    {"model.rows": (WHOLE[:4], (0, 0)), "model.columns": (WHOLE[:, :3], (0, 0)), "model.norm": (NORM, (0,))},
    {"model.rows": (WHOLE[4:], (4, 0)), "model.columns": (WHOLE[:, 3:], (0, 3)), "model.norm": (NORM, (0,))},
    {"model.rows": (WHOLE[7:], (7, 0)), "model.norm": (NORM, (0,))},
]


def test_torch_alone_reads_a_copy(tmp_path: Path) -> None:
    tied = {**TENSORS, "model.tied": TENSORS["model.weight"]}
    found = read_by_torch(tmp_path / save(tmp_path, {**tied, "step": 3}), tmp_path / "out")
    assert found.keys() == tied.keys()
    assert all(equal(found[name], value) for name, value in tied.items())


def test_torch_alone_reads_a_copy_of_shards(tmp_path: Path) -> None:
    found = read_by_torch(tmp_path / save_shards(tmp_path, *SHARDS), tmp_path / "out")
    assert found["model.rows"].equal(WHOLE)
    assert found["model.columns"].equal(WHOLE)
    assert found["model.norm"].equal(NORM)


def test_export_writes_full_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_shards(tmp_path, *SHARDS)
    out = tmp_path / "out.safetensors"
    assert main(["export", str(tmp_path), "-o", str(out), "--value", "model"]) == 0
    assert "3 tensors" in capsys.readouterr().out
    found = load_file(out)
    assert found["rows"].equal(WHOLE)
    assert found["columns"].equal(WHOLE)
    assert found["norm"].equal(NORM)


def test_export_of_a_replicated_state(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    names = {f"model.parameters.{name}": value.detach() for name, value in module.named_parameters()}
    names |= {f"model.buffers.{name}": value for name, value in module.named_buffers()}
    save(tmp_path, {**names, "ballast": torch.randn(5_000_000), "step": 1})
    name = save(tmp_path, {**names, "ballast": torch.ones(3)}, number=2)
    out = tmp_path / "out.safetensors"
    assert main(["export", str(tmp_path / name), "-o", str(out), "--value", "model"]) == 0
    module.load_state_dict(load_file(out))
    assert main(["export", str(tmp_path / copy_name(1)), "-o", str(out)]) == 0
    found = load_file(out)
    assert found.keys() == {*names, "ballast"}
    assert found["ballast"].numel() == 5_000_000


def test_export_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.safetensors"
    assert main(["export", str(tmp_path / "none"), "-o", str(out)]) == 1
    assert "has no durable copy" in capsys.readouterr().err
    name = save(tmp_path, TENSORS)
    assert main(["export", str(tmp_path), "-o", str(out), "--value", "modle"]) == 2
    assert "--value: 'modle': the copy has no such tensors, only of array, model, optimizer" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "-o", str(tmp_path)]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == 2
    assert main(["export", "nfs4://x/y", "-o", str(out)]) == 2
    assert "fsspec knows no protocol 'nfs4'" in capsys.readouterr().err
    tensors = tmp_path / name / "part-1.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-80] ^= 1
    tensors.write_bytes(content)
    assert main(["export", str(tmp_path), "-o", str(out)]) == 1
    assert "part-1.safetensors is damaged: the checksum of block 0 is wrong" in capsys.readouterr().err
    tensors.unlink()
    assert main(["export", str(tmp_path), "-o", str(out)]) == 1
    error = capsys.readouterr().err
    assert f"{name} is skipped: part-1.safetensors is missing" in error
    assert "none of its copies is complete" in error
    assert not list(tmp_path.glob("out*"))


def test_a_shard_that_is_missing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_shards(tmp_path, SHARDS[0])
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "out")]) == 0  # of other shards nobody knows
    save_shards(tmp_path, SHARDS[1])
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "out")]) == 1
    assert "shards of model.rows are missing" in capsys.readouterr().err


def test_the_shards_of_one_worker_never_become_a_copy(tmp_path: Path) -> None:
    commit, storage = shard_file(SHARDS[0]), Directory(str(tmp_path), Files())
    with pytest.raises(ShardedCommitError, match="only the shards of one worker"):
        upload(order(1, commit, place=str(tmp_path)), memoryview(commit), storage, Sent())
    assert storage.folders() == []


def test_the_manifest_is_text_for_people(tmp_path: Path) -> None:
    manifest = json.loads((tmp_path / save(tmp_path, TENSORS) / MANIFEST).read_text())
    assert manifest["copy"]["commit"] == [1, 1]
    assert manifest["copy"]["parts"][0]["tensors"]["name"] == "part-1.safetensors"


def test_a_host_that_fails_leaves_the_files_of_the_others_alone(tmp_path: Path) -> None:
    """Their errors would hide the reason. The next attempt removes all files."""
    commits = [shard_file({"model.weight": (torch.randn(3, 3), (at, 0))}) for at in (0, 3)]
    storage, name = Directory(str(tmp_path), Files()), copy_name(1)
    orders = [
        UploadOrder(str(tmp_path), name, 3, "job", "id", CommitId(3, 4), 2, 2, (StagedPart(n, n, 0, len(commit)),))
        for n, commit in enumerate(commits, 1)
    ]
    upload(orders[0], memoryview(commits[0]), storage, Sent())
    before = storage.sizes(name)
    with pytest.raises(ValueError, match="no header"):
        upload(orders[1], memoryview(bytes(len(commits[1]))), storage, Sent())
    assert storage.sizes(name) == before
    upload(structs.replace(orders[0], folder=copy_name(2)), memoryview(commits[0]), storage, Sent())
    assert storage.folders() == [copy_name(2)]


def test_hosts_save_parts_and_one_of_them_completes_the_copy(tmp_path: Path) -> None:
    weight = torch.randn(7, 3)
    blocks = [shard_file({"model.weight": (weight[at : at + 3], (at, 0))}) for at in (0, 3, 6)]
    staged = [b"".join((blocks[0], blocks[1])), blocks[2]]
    hosts = [(StagedPart(1, 7, 0, len(blocks[0])), StagedPart(2, 8, len(blocks[0]), len(blocks[1])))]
    hosts.append((StagedPart(3, 9, 0, len(blocks[2])),))
    storage, name = Directory(str(tmp_path), Files()), copy_name(1)
    whole = UploadOrder(str(tmp_path), name, 3, "job", "id", CommitId(3, 4), 3, 3)

    def save_part(number: int) -> None:
        sent = Sent()
        upload(structs.replace(whole, parts=hosts[number]), memoryview(staged[number]), storage, sent)
        assert sent.last.is_saved
        assert not (tmp_path / name / MANIFEST).exists()

    save_part(0)
    with pytest.raises(DamagedCopyError, match=r"part-3\.json is missing"):
        upload(whole, memoryview(b""), storage, Sent())
    assert storage.folders() == [], "a copy without all parts never passes for complete, and takes no space"
    save_part(1)
    save_part(0)
    (tmp_path / name / "part-2.safetensors").unlink()
    with pytest.raises(DamagedCopyError, match=r"part-2\.safetensors is missing"):
        upload(whole, memoryview(b""), storage, Sent())
    assert storage.folders() == []
    save_part(0)
    save_part(1)
    sent = Sent()
    upload(whole, memoryview(b""), storage, sent)
    assert sent.last.is_saved
    manifest = read_manifest(storage, name)
    assert [part.digest for part in manifest.parts] == [7, 8, 9]
    assert sent.last.bytes == manifest.size_bytes
    assert equal(read_by_torch(tmp_path / name, tmp_path / "out")["model.weight"], weight)
