"""Results of ``launch()``: sent to the driver part by part.

The file begins with a keyed checksum of the rest, which the worker writes last. So a result is known to be complete,
and written by a worker of this job, before anything unpickles it.
"""

from __future__ import annotations

import hmac
import os

from elasticstate.net import messages
from elasticstate.seals import RESULT_HEAD_BYTES, result_hasher

_PART_BYTES = 1 << 20
_LOST = 1  # size sent without data: the driver then reports the result as lost


class Results:
    """The results of one host. ``key``: the key of the job's storage."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sizes: dict[int, int] = {}  # by slot; of verified results

    def part(self, fd: int | None, slot: int, offset: int) -> messages.Fetched:
        """Return the part at ``offset``. The first call reads the whole result: call it in a thread."""
        if fd is None:
            return messages.Fetched(slot, offset, b"", 0)
        if offset == 0:
            self._sizes[slot] = self._verified_size(fd)
        size = self._sizes.get(slot, _LOST)
        if size < 0:
            return messages.Fetched(slot, offset, b"", _LOST)
        return messages.Fetched(slot, offset, os.pread(fd, _PART_BYTES, RESULT_HEAD_BYTES + offset), size)

    def _verified_size(self, fd: int) -> int:
        """Return the size; 0 if nothing was returned; -1 if no worker of this job has written the file."""
        size = os.fstat(fd).st_size - RESULT_HEAD_BYTES
        if size < 0:
            return 0 if size == -RESULT_HEAD_BYTES else -1
        hasher = result_hasher(self._key)
        at = RESULT_HEAD_BYTES
        while data := os.pread(fd, _PART_BYTES, at):
            hasher.update(data)
            at += len(data)
        return size if hmac.compare_digest(os.pread(fd, RESULT_HEAD_BYTES, 0), hasher.digest()) else -1
