"""Commit files for tests: as a worker writes them, or made by hand with shards."""

from __future__ import annotations

import json
from typing import Any

import torch

from elasticstate.core.ids import CommitId
from elasticstate.durable.stored_copies import copy_name
from elasticstate.durable.upload import StagedPart, UploadMessage, UploadOrder
from elasticstate.state.snapshot import PrivateStorage, Snapshot


def commit_of(values: dict[str, Any], private: bytes = b"random state") -> bytes:
    """Return the bytes of a commit of these values, as they are in the buffer of a worker."""
    storage = PrivateStorage()
    snapshot = Snapshot(storage)
    snapshot.write(values, private, CommitId(1, 1))
    sealed = storage.page.sealed(0, storage.owner)
    assert sealed is not None
    return bytes(storage.open(0)[: sealed[3]].numpy())


def shard_file(tensors: dict[str, tuple[torch.Tensor, tuple[int, ...]]]) -> bytes:
    """Return a commit file of shards: name -> (block, its offsets in the whole tensor)."""
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "elasticstate": json.dumps({"version": 1, "kinds": {}, "tied": {}, "order": None}),
            "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": at} for name, (_, at) in tensors.items()}),
        },
        "elasticstate.random": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]},
    }
    data, end = b"", 64
    for name, (block, _) in tensors.items():
        content = block.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(block.shape), "data_offsets": [end, end + len(content)]}
        data, end = data + content, end + len(content)
    header["elasticstate.objects"] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
    text = json.dumps(header).encode().ljust(8 * 512 - 8)
    return len(text).to_bytes(8, "little") + text + bytes(64) + data + b"None"


def order(number: int, commit: bytes, keep: int = 3, earlier: tuple[str, ...] = (), place: str = "/d") -> UploadOrder:
    """Return the order for the copy with this number."""
    parts = (StagedPart(1, 0, 0, len(commit)),)
    return UploadOrder(place, copy_name(number), keep, "job", "id", CommitId(1, number), 2, 1, parts, earlier)


class Sent:
    """Messages of an upload."""

    def __init__(self) -> None:
        self.messages: list[UploadMessage] = []

    def __call__(self, message: UploadMessage) -> None:
        self.messages.append(message)

    @property
    def last(self) -> UploadMessage:
        return self.messages[-1]
