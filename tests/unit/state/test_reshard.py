"""Shards of random worlds, compared with the whole tensors that they are made of."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from elasticstate.commits import OBJECTS, RANDOM, Shard as Place, decode
from elasticstate.errors import CollectiveError, StateError
from elasticstate.state import reshard
from elasticstate.state.reshard import CommitCopies, Piece, chunk_of, content_sum, digest_of
from tests.kit.sharded import COMMIT, DTYPES, SnapshotCopies, committed, local, mesh, source, whole_tensors


def copies_of(worlds: Sequence[dict[str, Piece]]) -> tuple[CommitCopies, SnapshotCopies]:
    snapshots = [committed(pieces) for pieces in worlds]
    reader = SnapshotCopies(lambda slot: snapshots[slot])
    sources = [source(digest_of(pieces.items()), slot, COMMIT) for slot, pieces in enumerate(worlds)]
    return CommitCopies(reader, sources), reader


def empty_like(pieces: dict[str, Piece], draw: random.Random) -> dict[str, Piece]:
    """Return targets, some of which are not contiguous in memory."""
    found = {}
    for name, (value, shard) in pieces.items():
        is_dense = value.ndim < 2 or draw.random() < 0.7
        memory = torch.zeros(value.shape if is_dense else value.shape[::-1], dtype=torch.uint8).to(value.dtype)
        found[name] = Piece(memory if is_dense else memory.permute(*range(value.ndim)[::-1]), shard)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("seed", range(80))
def test_shards_stay_bitwise_the_same_in_a_sequence_of_random_worlds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(reshard, "RUN_BYTES", draw.choice((0, 8, 1 << 20)))
    monkeypatch.setattr(reshard, "STAGING_BYTES", draw.choice((8, 64, 1 << 20)))
    tensors = whole_tensors(draw)
    now = mesh(draw, tensors)
    world = [local(tensors, now, coordinate) for coordinate in now.coordinates()]
    for _ in range(3):
        copies, reader = copies_of(world)
        then = mesh(draw, tensors)
        world = []
        for coordinate in then.coordinates():
            expected = local(tensors, then, coordinate)
            targets = empty_like(expected, draw)
            copies.load(targets)
            for name, (value, _) in targets.items():
                assert bits(value) == bits(expected[name].local), name
            world.append({name: Piece(value.contiguous(), shard) for name, (value, shard) in targets.items()})
        assert reader.headers_read <= math.prod(now.shape)
        now = then


@pytest.mark.parametrize("seed", range(60))
def test_the_parts_of_a_tensor_are_those_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    tensors = whole_tensors(draw)
    world = mesh(draw, tensors)
    for name, tensor in tensors.items():
        splits = world.splits[name]
        if any(split is not None and split[1] for split in splits):
            continue  # torch computes other parts than FSDP2 makes, where a dimension is shorter than the mesh
        placements = [Replicate() if split is None else Shard(split[0]) for split in splits]
        for coordinate in world.coordinates():
            shape = tuple(tensor.shape)
            sizes, offsets = _compute_local_shape_and_global_offset(shape, world.shape, list(coordinate), placements)
            found = chunk_of(shape, world.shape, coordinate, splits)
            assert found[1] == sizes
            assert found[0] == offsets or 0 in sizes


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2), (2, 3)])
def test_fsdp_cuts_what_tensor_parallelism_has_cut(data: int, tensor: int) -> None:
    for rows in range(12):
        for coordinate in itertools.product(range(data), range(tensor)):
            part = torch.arange(rows)
            for count, at in ((tensor, coordinate[1]), (data, coordinate[0])):
                chunks = [*part.chunk(count), *[part[:0]] * count]
                part = chunks[at]
            offsets, sizes = chunk_of((rows,), (data, tensor), coordinate, ((0, tensor), (0, 0)))
            assert list(range(offsets[0], offsets[0] + sizes[0])) == part.tolist()


def test_a_strided_placement_that_is_not_fsdps_is_refused() -> None:
    with pytest.raises(ValueError, match="not those of FSDP2"):
        chunk_of((8,), (2, 2), (0, 0), ((0, 4), (0, 0)))


def rows(sizes: Sequence[int], columns: int = 4) -> tuple[torch.Tensor, list[dict[str, Piece]]]:
    """Return a tensor, and the parts of workers that have so many rows each."""
    whole = torch.arange(float(sum(sizes) * columns)).view(-1, columns)
    ends = list(itertools.accumulate(sizes))
    return whole, [
        {"model.w": Piece(whole[end - size : end].clone(), Place(tuple(whole.shape), (end - size, 0)))}
        for size, end in zip(sizes, ends, strict=True)
    ]


def test_only_the_bytes_of_the_new_part_are_read() -> None:
    whole, world = rows((3, 3, 1))
    copies, reader = copies_of(world)
    target = {"model.w": Piece(torch.zeros(2, 4), Place((7, 4), (2, 0)))}
    copies.load(target)
    assert torch.equal(target["model.w"].local, whole[2:4])
    assert (reader.bytes_read, reader.headers_read) == (2 * 4 * 4, 2)


def test_columns_are_read_as_whole_rows_only_if_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, world = rows((8,))
    for run_bytes, expected in ((0, 8 * 4), (1 << 10, 8 * 16)):
        monkeypatch.setattr(reshard, "RUN_BYTES", run_bytes)
        copies, reader = copies_of(world)
        target = {"model.w": Piece(torch.zeros(8, 1), Place((8, 4), (0, 2)))}
        copies.load(target)
        assert torch.equal(target["model.w"].local, whole[:, 2:3])
        assert reader.bytes_read == expected


def test_a_block_that_is_one_run_is_read_straight_into_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, world = rows((3, 3))
    copies, _ = copies_of(world)
    monkeypatch.setattr(copies, "_stage", lambda *_: pytest.fail("it passes through the staging buffer"))
    target = {"model.w": Piece(torch.zeros(6, 4), Place((6, 4), (0, 0)))}
    copies.load(target)
    assert torch.equal(target["model.w"].local, whole)


def test_another_copy_with_the_same_shards_replaces_one_that_fails() -> None:
    whole, world = rows((3, 3))
    _, reader = copies_of([*world, world[0]])
    digests = [digest_of(pieces.items()) for pieces in world]
    sources = [source(digests[0], 0, COMMIT), source(digests[1], 1, COMMIT), source(digests[0], 2, COMMIT)]
    for breaks_after in range(4):  # at the header, at the seal, when shards are read
        reader.breaks_after = {0: breaks_after}
        target = {"model.w": Piece(torch.zeros(6, 4), Place((6, 4), (0, 0)))}
        CommitCopies(reader, sources).load(target)
        assert torch.equal(target["model.w"].local, whole)


def test_the_error_names_parts_and_hosts_that_are_missing() -> None:
    _, world = rows((3, 3))
    copies, reader = copies_of(world)
    reader.broken = {1}
    target = {"model.w": Piece(torch.zeros(6, 4), Place((6, 4), (0, 0)))}
    with pytest.raises(CollectiveError, match=r"model\.w\[3:6, 0:4\].*host1 \(slot host1:1: the host does not answer"):
        copies.load(target)


def test_a_tensor_that_does_not_fit_the_commit_is_refused_before_anything_is_written() -> None:
    _, world = rows((3, 3))
    copies, _ = copies_of(world)
    for name, value, shape in (
        ("model.w", torch.zeros(5, 4), (5, 4)),
        ("model.w", torch.zeros(6, 4, dtype=torch.float64), (6, 4)),
        ("model.v", torch.zeros(6, 4), (6, 4)),
    ):
        good = Piece(torch.zeros(6, 4), Place((6, 4), (0, 0)))
        with pytest.raises(StateError, match="Attach the same objects"):
            copies.load({"model.w": good, name: Piece(value, Place(shape, (0, 0)))})
        assert not good.local.any()


def test_a_header_is_readable_without_torch() -> None:
    _, world = rows((3, 3))
    snapshot = committed(world[1])
    buffer = snapshot._newer
    begin = buffer.frame.random
    _, notes, stored = decode(buffer.memory[:begin].numpy().tobytes())
    tensor, shards = stored["model.w"], notes.sharding.shards
    assert (tensor.dtype, tensor.shape, shards["model.w"]) == ("F32", (3, 4), Place((6, 4), (3, 0)))
    place = slice(begin + tensor.data_offsets[0], begin + tensor.data_offsets[1])
    assert bits(world[1]["model.w"].local) == buffer.memory[place].numpy().tobytes()
    assert "plain" in stored
    assert "plain" not in shards
    assert notes.sharding.names == ("model",)
    assert (stored[RANDOM].data_offsets[0], begin + stored[OBJECTS].data_offsets[0]) == (0, buffer.frame.objects)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 6), (3, 4, 5)])
def test_the_sum_of_a_content_does_not_depend_on_the_cut(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
    total = content_sum(Piece(whole, Place(shape, (0,) * len(shape))))
    monkeypatch.setattr(reshard, "_ELEMENTS", 8)
    assert content_sum(Piece(whole, Place(shape, (0,) * len(shape)))) == total
    for d, size in enumerate(shape):
        parts = zip(whole.split(2, d), range(0, size, 2), strict=False)
        places = ((part, tuple(at if e == d else 0 for e in range(len(shape)))) for part, at in parts)
        assert sum(content_sum(Piece(part, Place(shape, place))) for part, place in places) % (1 << 64) == total
    if whole.numel() > 1:
        flat = whole.reshape(-1)
        flat[0], flat[1] = 0, 1
        ordered = content_sum(Piece(whole, Place(shape, (0,) * len(shape))))
        flat[0], flat[1] = 1, 0
        assert content_sum(Piece(whole, Place(shape, (0,) * len(shape)))) != ordered
