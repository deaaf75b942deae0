"""TransactionLog: the file of an offline run of Weights & Biases, read while wandb writes it.

The format is that of the log of LevelDB: blocks of 32 KiB with chunks, of which a record has one or more. wandb adds
seven bytes at the beginning. Checked with wandb 0.31, which has no reader in Python.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticstate.loggers.sink import required

_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _LAST = 1, 4


class TransactionLog:
    """Reader of the steps in one file. Each call of ``steps`` continues after the last whole record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = _HEADER_BYTES
        self._messages = required("wandb.proto.wandb_internal_pb2", "wandb", "WandB")

    def steps(self) -> Iterator[int]:
        """Yield the steps of the rows of the history that were written since the last call."""
        for values in self.rows():
            if "_step" in values:
                yield int(values["_step"])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the history that were written since the last call."""
        for data in self._records():
            record = self._messages.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}

    def fence(self) -> None:
        """Replace the file by a copy of the records that were read. Its writer writes to a file without a name then.

        The process of wandb outlives a worker that was killed, and writes its last rows late.
        """
        copy = self.path.with_suffix(".copy")
        with open(copy, "wb") as file:
            file.write(self.path.read_bytes()[: self._position])
            file.flush()
            os.fsync(file.fileno())
        copy.replace(self.path)

    def _records(self) -> Iterator[bytes]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._position)
            data, start, record = file.read(), self._position, b""
        position = start
        while position + _CHUNK.size <= start + len(data):
            rest = _BLOCK_BYTES - position % _BLOCK_BYTES
            if rest < _CHUNK.size:  # too short for a chunk
                position += rest
                continue
            _, length, kind = _CHUNK.unpack_from(data, position - start)
            end = position + _CHUNK.size + length
            if kind == 0 or end > start + len(data):
                return  # not written yet
            record += data[position - start + _CHUNK.size : end - start]
            position = end
            if kind in (_FULL, _LAST):
                self._position = position
                yield record
                record = b""
