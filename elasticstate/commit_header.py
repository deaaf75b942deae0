"""Header of a commit, readable without torch: the places of its tensors, and which of them are shards.

The file is a safetensors file (see state/layout.py). Its metadata has two keys besides ``format``: ``elasticstate``,
and ``DCP_SHARDING_INFO`` if values are attached. The second is that of torch.distributed.checkpoint
(``torch/distributed/checkpoint/hf_storage.py`` of torch 2.13): ``HuggingFaceStorageReader`` finds the offsets of each
shard there, so that a directory of commit files is a checkpoint that torch reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

OBJECTS = "elasticstate.objects"
RANDOM = "elasticstate.random"
METADATA = "__metadata__"
VERSION = 1


class Shard(msgspec.Struct, array_like=True, frozen=True):
    """Place of an entry in a tensor that the workers of a world hold together."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]


class Sharding(msgspec.Struct, array_like=True, frozen=True):
    """Attached values of a commit: their names, and the places of all their tensors. Replicated ones have offset 0."""

    names: tuple[str, ...] = ()
    shards: dict[str, Shard] = {}


NO_SHARDING = Sharding()


class Stored(msgspec.Struct, frozen=True):
    """A tensor as the format describes it. Offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties that the format cannot describe."""

    version: int
    kinds: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape) where the stored ones differ
    tied: dict[str, str]  # name -> the name under which the bytes are stored
    order: list[str] | None  # all names in capture order; None: capture order is the stored order
    sharding: Sharding = NO_SHARDING


class Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    format: str  # "pt": the value that other readers of such files expect
    elasticstate: str  # Notes as JSON, because the format's metadata contains only strings
    DCP_SHARDING_INFO: str = ""  # sharding_info() as JSON


class _SavedOffsets(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


def sharding_info(stored: Mapping[str, Stored], names: Iterable[str], sharding: Sharding) -> str:
    """Return what torch's HuggingFaceStorageReader reads. It requires all names of the file, in ``names``.

    ``stored``: the tensors, some of which have more dimensions than their shards (complex numbers as pairs).
    """
    found = dict.fromkeys(names, _SavedOffsets((0,)))
    for name, item in stored.items():
        shard = sharding.shards.get(name)
        offsets = shard.offsets if shard is not None else ()
        found[name] = _SavedOffsets((*offsets, *[0] * (len(item.shape) - len(offsets))))
    return msgspec.json.encode(found).decode()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a commit file. ``begin`` and ``end``: its bytes in the file.

    ``shape``: of the bytes that are stored; ``shard``: their place in a whole tensor. None: no attached value has it.
    """

    dtype: str  # in the words of the format: "F32"
    shape: tuple[int, ...]
    begin: int
    end: int
    shard: Shard | None


@dataclass(frozen=True, slots=True)
class CommitHeader:
    """Content of a header. Offsets count from the beginning of the file.

    The objects (one pickle) extend from ``objects`` to the sealed length of the commit.
    """

    random: int
    objects: int
    tensors: dict[str, StoredTensor]
    attached: tuple[str, ...]  # names of the attached values


def read(header: bytes | memoryview) -> CommitHeader:
    """Parse a header: all bytes before the random state. Tied tensors appear once.

    Raises ValueError if it is damaged.
    """
    notes, stored = decode(header)
    begin = len(header)
    try:
        random, objects = stored.pop(RANDOM), stored.pop(OBJECTS)
    except KeyError as error:
        raise ValueError(f"the header lacks {error}") from None
    tensors = {
        name: StoredTensor(
            item.dtype,
            item.shape,
            begin + item.data_offsets[0],
            begin + item.data_offsets[1],
            notes.sharding.shards.get(name),
        )
        for name, item in stored.items()
    }
    return CommitHeader(begin + random.data_offsets[0], begin + objects.data_offsets[0], tensors, notes.sharding.names)


def decode(header: bytes | memoryview) -> tuple[Notes, dict[str, Stored]]:
    """Return the notes and the stored tensors of a header. Raises ValueError if it is damaged."""
    try:
        raw = msgspec.json.decode(header[8:], type=dict[str, msgspec.Raw])
        if METADATA not in raw:
            raise ValueError("the header has no metadata")
        metadata = msgspec.json.decode(raw.pop(METADATA), type=Metadata)
        notes = msgspec.json.decode(metadata.elasticstate, type=Notes)
        stored = {name: msgspec.json.decode(item, type=Stored) for name, item in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if notes.version != VERSION:
        raise ValueError(f"the format version is {notes.version}, not {VERSION}")
    return notes, stored
