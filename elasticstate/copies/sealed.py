"""Sealed content of one commit: its identity, and the checks that need only its bytes and the job's key.

A copy has the content of the buffer, so it also has the seal of the buffer (see seals.py). The tag of the seal proves
that a process of this job has written what a reader unpickles or parses.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import msgspec

from elasticstate.core.ids import CommitId, SlotId
from elasticstate.errors import CopyError
from elasticstate.seals import commit_tag, part_tag

MAX_HEADER_BYTES = 256 << 20
_LENGTH_BYTES = 8
_RANDOM = "elasticstate.random"
_OBJECTS = "elasticstate.objects"

ReadBytes = Callable[[int, int], bytes]
"""Returns the bytes of a file at (offset, length)."""


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """The seal of a buffer: it names a commit of a slot, and covers the first ``length`` bytes of a file."""

    slot: SlotId
    commit: CommitId
    index: int  # of the buffer that was sealed
    layout: int  # digest of the header
    length: int
    checksum: int  # CRC-32C of these bytes
    tag: bytes

    def __str__(self) -> str:
        return f"commit {self.commit} of slot {self.slot}"

    @property
    def content(self) -> tuple[int, int, int]:
        """Identity of the bytes: layout, length and checksum. A new id for a commit does not change it."""
        return self.layout, self.length, self.checksum


class Parts(msgspec.Struct, frozen=True):
    """Offsets of the parts of a file, in bytes."""

    random: int  # end of the header
    tensors: int
    objects: int
    size_bytes: int  # of the whole file, as its header states; a seal covers all bytes in use


class _DataOffsets(msgspec.Struct):
    data_offsets: tuple[int, int]


def read_header(read: ReadBytes, length: int) -> bytes:
    """Return all bytes before the random state. Raises CopyError if the file has no header."""
    prefix = read(0, _LENGTH_BYTES)
    size = _LENGTH_BYTES + int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or size > min(length, MAX_HEADER_BYTES):
        raise CopyError(f"the file of {length} bytes has no header")
    return read(0, size)


def parts_of(header: bytes) -> Parts:
    """Return the places of the parts that a header describes. Raises CopyError."""
    begin = len(header)
    try:
        items = msgspec.json.decode(memoryview(header)[_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        random = msgspec.json.decode(items[_RANDOM], type=_DataOffsets).data_offsets
        objects = msgspec.json.decode(items[_OBJECTS], type=_DataOffsets).data_offsets
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise CopyError(f"the header of a commit is malformed ({error})") from error
    if not 0 == random[0] <= random[1] <= objects[0] <= objects[1]:
        raise CopyError("the header of a commit has its parts in a wrong order")
    return Parts(begin, begin + random[1], begin + objects[0], begin + objects[1])


def check_authentic(sealed: Sealed, owner: bytes, key: bytes, header: bytes, read: ReadBytes) -> Parts:
    """Raise CopyError unless a process of this job has sealed this header, this random state and these objects."""
    parts = parts_of(header)
    if not parts.objects <= sealed.length <= parts.size_bytes:
        raise CopyError(f"{sealed}: the header states {parts.size_bytes} bytes, the seal {sealed.length}")
    random = read(parts.random, parts.tensors - parts.random)
    objects = read(parts.objects, sealed.length - parts.objects)
    tags = part_tag(key, header), part_tag(key, random, objects)
    tag = commit_tag(key, owner, sealed.index, sealed.commit, sealed.length, sealed.checksum, *tags)
    if layout_digest(header) != sealed.layout or not hmac.compare_digest(tag, sealed.tag):
        raise CopyError(f"{sealed}: no process of this job has written this content")
    return parts


def layout_digest(header: Any) -> int:
    """Return the digest of a header that a seal contains."""
    return int.from_bytes(hashlib.blake2b(header, digest_size=8).digest(), "little")
