"""Copies of sharded states: random shards of random meshes, read into others, by torch alone, and as whole tensors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from elasticstate.durable.durable_storage import Directory, Files
from elasticstate.durable.export import export
from elasticstate.durable.stored_copies import (
    BLOCK_BYTES,
    DamagedCopyError,
    Manifest,
    StoredCopies,
    copy_name,
    read_manifest,
)
from elasticstate.durable.upload import StagedPart, UploadOrder, upload
from elasticstate.errors import CollectiveError
from elasticstate.state.reshard import Piece, StoredParts, digest_of
from elasticstate.state.snapshot import Snapshot
from tests.kit.durable import Sent
from tests.kit.sharded import COMMIT, Mesh, committed, local, mesh, whole_tensors

PIECES = list[dict[str, Piece]]


def pieces_of(tensors: dict[str, torch.Tensor], on: Mesh) -> PIECES:
    return [local(tensors, on, coordinate) for coordinate in on.coordinates()]


def content_of(snapshot: Snapshot) -> bytes:
    header, _ = snapshot.outgoing()
    assert header
    newer = snapshot._newer
    return bytes(newer.memory[: newer.length].numpy())


def save(place: Path, worlds: PIECES) -> Manifest:
    """Save a part for each different set of shards. Return the manifest."""
    commits = {digest_of(pieces.items()): content_of(committed(pieces)) for pieces in worlds}
    staged, parts = b"", []
    for number, (digest, content) in enumerate(commits.items(), start=1):
        parts.append(StagedPart(number, digest, len(staged), len(content)))
        staged += content
    order = UploadOrder(str(place), copy_name(1), 3, "job", "id", COMMIT, len(worlds), len(parts), tuple(parts))
    storage, sent = Directory(str(place), Files()), Sent()
    upload(order, memoryview(staged), storage, sent)
    assert sent.last.is_saved
    return read_manifest(storage, copy_name(1))


def stored(place: Path, manifest: Manifest) -> StoredParts:
    return StoredParts(StoredCopies(str(place), 30.0), copy_name(1), manifest)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    return found.reshape(-1).view(torch.uint8).equal(wanted.reshape(-1).view(torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("seed", range(25))
def test_random_shards_are_read_into_another_mesh_by_torch_and_as_whole_tensors(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tensors = whole_tensors(draw)
    worlds = pieces_of(tensors, mesh(draw, tensors))
    manifest = save(tmp_path / "run", worlds)
    assert len(manifest.parts) == len({digest_of(pieces.items()) for pieces in worlds}), "replicas are saved once"
    parts = stored(tmp_path / "run", manifest)
    others = pieces_of(tensors, mesh(draw, tensors))
    for rank, wanted in enumerate(others):
        parts.verify(rank, len(others))
        targets = {name: Piece(torch.zeros_like(piece.local), piece.shard) for name, piece in wanted.items()}
        with parts.commit_copies(rank) as copies:
            copies.load(targets)
            values, private = copies.plain()
        assert all(same(piece.local, wanted[name].local) for name, piece in targets.items())
        assert (values["plain"].tolist(), private) == ([1.0] * 3, b"random")

    copy, out = tmp_path / "run" / copy_name(1), tmp_path / "out"
    reader = HuggingFaceStorageReader(str(copy))
    found = reader.read_metadata().state_dict_metadata
    read = {name: torch.zeros(item.size, dtype=item.properties.dtype) for name, item in found.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(copy)), no_dist=True)
    export(StoredCopies(str(tmp_path / "run"), 30.0), copy_name(1), manifest, str(out), None, lambda size: None)
    exported = load_file(out)
    for name, tensor in tensors.items():
        assert same(read[name], tensor), f"torch reads {name} {tuple(tensor.shape)}"
        assert same(exported[name], tensor), f"{name} {tuple(tensor.shape)} is exported"


def test_any_damage_is_found_by_the_rank_that_verifies_it_and_nothing_is_loaded(tmp_path: Path) -> None:
    tensors = {"model.0": torch.randn(7, BLOCK_BYTES // 16), "model.1": torch.randn(3)}
    worlds = pieces_of(tensors, Mesh((3,), {"model.0": ((0, 0),), "model.1": ((0, 0),)}))
    manifest = save(tmp_path, worlds)
    for file in manifest.files:
        path = tmp_path / copy_name(1) / file.name
        content = path.read_bytes()
        at = len(content) - 1 if file.name.endswith("safetensors") else len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found = [damage(stored(tmp_path, manifest), rank) for rank in range(2)]
        assert len([text for text in found if file.name in text]) == 1, f"{file.name}: {found}"
        assert "" in found, "the other rank has verified another share"
        if file.name.endswith("safetensors"):
            targets = {name: Piece(torch.zeros_like(tensor), piece.shard) for name, tensor, piece in _whole(tensors)}
            with pytest.raises(CollectiveError, match="is damaged"):
                stored(tmp_path, manifest).commit_copies(0).load(targets)
        path.write_bytes(content)


def damage(parts: StoredParts, rank: int) -> str:
    """Return what this one of two ranks finds wrong; "" if its share is intact."""
    try:
        parts.verify(rank, 2)
    except DamagedCopyError as error:
        return str(error)
    return ""


def _whole(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, Piece]]:
    (pieces,) = pieces_of(tensors, Mesh((1,), dict.fromkeys(tensors, (None,))))
    return [(name, tensor, pieces[name]) for name, tensor in tensors.items()]
