"""Seals: keyed checksums of data that a job writes to files and reads again. A job unpickles only sealed data.

The key is derived from the job's token (net/trust.py). Only the memory of the job's processes contains it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

TAG_BYTES = 16
RESULT_HEAD_BYTES = TAG_BYTES

_COMMIT = struct.Struct("<16sIQQQI16s16s")


def part_tag(key: bytes, *parts: Any) -> bytes:
    """Return the tag of buffers of bytes, in this order."""
    hasher = hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=b"part")
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def commit_tag(
    key: bytes,
    owner: bytes,
    index: int,
    commit: tuple[int, int],
    length: int,
    checksum: int,
    header: bytes,
    rest: bytes,
) -> bytes:
    """Return the tag of a seal: owner, buffer index, commit, length, CRC-32C of all bytes, tags of the unpickled parts.

    ``header`` is the tag of the header, ``rest`` the tag of random state and objects.
    """
    fields = _COMMIT.pack(owner, index, *commit, length, checksum, header, rest)
    return hashlib.blake2b(fields, digest_size=TAG_BYTES, key=key, person=b"commit").digest()


def result_hasher(key: bytes) -> Any:
    """Return the hasher for the result of a worker of ``launch()``."""
    return hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=b"result")
