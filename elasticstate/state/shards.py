"""Shards: the part of each attached tensor that one worker holds, and the access to copies that hold other parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from elasticstate.commit_header import Shard
from elasticstate.compat import dtensors
from elasticstate.compat.dtensors import Split
from elasticstate.core.types import CopyOf
from elasticstate.errors import StateError
from elasticstate.state.layout import digest
from elasticstate.state.plan import dtype_name


class SealedContent(Protocol):
    """The seal of a copy."""

    @property
    def length(self) -> int:
        """Size of the sealed content, in bytes."""


class CopyReader(Protocol):
    """Access to the copies in the memory of all hosts. All methods raise CopyError if a copy is gone, or damaged.

    Where a copy is served, its checksum is compared with its seal before any of its bytes are sent, and the seal again
    after a copy that its owner may overwrite was read. So the reader need not verify the content of a tensor.
    """

    def header(self, copy: CopyOf) -> bytes:
        """Return all bytes before the random state."""

    def sealed(self, copy: CopyOf) -> SealedContent:
        """Return the seal."""

    def read(self, copy: CopyOf, offset: int, length: int) -> bytes:
        """Return bytes that are proven to come from this job: for what is unpickled."""

    def read_into(self, copy: CopyOf, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read ranges: (offset in the file, where to put the bytes). After an error, these places are undefined."""

    def close(self) -> None:
        """Close all connections."""


class Piece(NamedTuple):
    """A tensor that this worker holds, and the place of its content in the whole tensor."""

    local: torch.Tensor
    shard: Shard


class PartPlace(NamedTuple):
    """PartPlace of a part in a whole tensor. Replicas have the same."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def piece_of(name: str, value: torch.Tensor) -> Piece:
    """Return the local tensor of a value. The shard of a plain tensor is all of it.

    Raises StateError if a DTensor has a placement that cannot be described.
    """
    if not dtensors.is_dtensor(value):
        shape = tuple(value.shape)
        return Piece(value, Shard(shape, (0,) * len(shape)))
    dtensor: Any = value
    local, shape = dtensors.local_of(dtensor), tuple(dtensor.shape)
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    try:
        splits = dtensors.splits_of(dtensor)
        offsets, sizes = (
            chunk_of(shape, tuple(mesh.shape), tuple(coordinate), splits)
            if coordinate is not None
            else (shape, tuple(local.shape))
        )
        if coordinate is not None and sizes != tuple(local.shape):
            raise ValueError(f"its local tensor is {tuple(local.shape)}, and its placements require {sizes}")
    except ValueError as error:
        raise StateError(
            f"{name} is a DTensor that cannot be committed: {error}. Attach tensors whose placements are Shard and "
            "Replicate."
        ) from error
    return Piece(local, Shard(shape, offsets))


def chunk_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], splits: Sequence[Split]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the part that a DTensor has at one coordinate of its mesh, as ``torch.chunk`` cuts.

    ``shape``: of the whole tensor. ``splits``: one for each dimension of the mesh.

    The first dimensions of the mesh cut first, except strided ones, which cut after all others, and in reverse order:
    FSDP2 shards a tensor that tensor parallelism has sharded before. So each part is one block.

    Raises ValueError for strided placements in another arrangement.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    plain = [at for at, split in enumerate(splits) if split is not None and not split[1]]
    strided = [at for at, split in enumerate(splits) if split is not None and split[1]]
    for at in (*plain, *reversed(strided)):
        split = splits[at]
        assert split is not None
        dim, factor = split
        later = [mesh[j] for j in range(at + 1, len(splits)) if (other := splits[j]) is not None and other[0] == dim]
        if factor and factor != math.prod(later):
            raise ValueError(f"its placements {list(splits)} on a mesh of {mesh} are not those of FSDP2")
        step = -(-sizes[dim] // mesh[at])
        begin, end = (min(sizes[dim], step * i) for i in (coordinate[at], coordinate[at] + 1))
        offsets[dim], sizes[dim] = offsets[dim] + begin, end - begin
    return tuple(offsets), tuple(sizes)


def digest_of(pieces: Iterable[tuple[str, Piece]]) -> int:
    """Return the digest of the shards that a worker holds: 63 bits, never 0. Workers with equal ones are replicas."""
    forms = sorted(
        (name, piece.shard.shape, dtype_name(piece.local.dtype), piece.shard.offsets, tuple(piece.local.shape))
        for name, piece in pieces
    )
    return digest(msgspec.msgpack.encode(forms)) >> 1 or 1
