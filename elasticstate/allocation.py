"""Allocation of files in memory: a file gets its full length, with all its blocks, before a process writes to it.

So a full file system causes an error, and never a SIGBUS in a process that has mapped the file.
"""

from __future__ import annotations

import ctypes
import errno
import os

_FALLOC_FL_KEEP_SIZE = 1

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate64  # os has only posix_fallocate, which also changes the length
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def grow(fd: int, size_bytes: int) -> int:
    """Make the file at least this long, with all its blocks allocated. Return its length. A file never shrinks.

    Raises OSError; then the file is unchanged.
    """
    before = os.fstat(fd).st_size
    if before >= size_bytes:
        return before
    try:
        _allocate_blocks(fd, before, size_bytes)
    except OSError:
        os.ftruncate(fd, before)
        raise
    os.ftruncate(fd, size_bytes)
    return size_bytes


def _allocate_blocks(fd: int, begin: int, end: int) -> None:
    """Allocate blocks without changing the length.

    A failed allocation truncates the file again, and a process that maps the file meanwhile must not lose a page.
    """
    while _fallocate(fd, _FALLOC_FL_KEEP_SIZE, begin, end - begin) != 0:
        number = ctypes.get_errno()
        if number == errno.EOPNOTSUPP:
            os.posix_fallocate(fd, begin, end - begin)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
