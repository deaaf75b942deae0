"""Room for commits: files are made as long as they have to be, with all their blocks, before a worker maps them.

So a commit directory that is full is an error that names the bytes, and never a SIGBUS in a worker. Taking a block
costs as much as writing it: seconds for each GB, in a thread of its own; heartbeats go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elasticstate.commits import CommitDirectory, buffer_file
from elasticstate.machine import in_words

_FALLOC_FL_KEEP_SIZE = 1
_STEPS = 16  # between two powers of two: a buffer is up to 1/16 larger than asked for, and seldom has to grow again
_SMALLEST_STEP_BYTES = 1 << 16
_THREADS = 4

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate64  # os has only the one that changes the length as it goes
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def grow(path: str, size_bytes: int) -> int:
    """Make the file at least so long, with all its blocks; returns its length. It is only ever longer than before.

    Raises OSError, and then the file is as it was.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(fd).st_size
        if before >= size_bytes:
            return before
        try:
            _take_blocks(fd, before, size_bytes)
        except OSError:
            os.ftruncate(fd, before)
            raise
        os.ftruncate(fd, size_bytes)
        return size_bytes
    finally:
        os.close(fd)


def _take_blocks(fd: int, begin: int, end: int) -> None:
    """The length stays until all are there: somebody may map the file meanwhile, and must not lose a page again."""
    while _fallocate(fd, _FALLOC_FL_KEEP_SIZE, begin, end - begin) != 0:
        number = ctypes.get_errno()
        if number == errno.EOPNOTSUPP:
            os.posix_fallocate(fd, begin, end - begin)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def rounded_up(size_bytes: int) -> int:
    """To the next of 16 steps between two powers of two."""
    step = max(_SMALLEST_STEP_BYTES, (1 << max(0, size_bytes.bit_length() - 1)) // _STEPS)
    return -(-size_bytes // step) * step


class Room:
    """Makes room in the commit directory of one host.

    ``workers()`` is how many live here; ``say`` gets a line when the first of them asks.
    """

    def __init__(self, directory: CommitDirectory, host: str, workers: Callable[[], int], say: Callable[[str], None]):
        self._directory = directory
        self._host = host
        self._workers = workers
        self._say = say
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="elasticstate-room")
        self._locks: dict[str, asyncio.Lock] = {}
        self._largest = 0  # that all may take
        self._has_told = False

    async def make(self, slot: int, index: int, size_bytes: int) -> tuple[int, str]:
        """Let buffer ``index`` of a slot be at least so long: (its length, "") or (0, why it cannot be)."""
        path = buffer_file(self._directory.prefix(slot), index)
        async with self._locks.setdefault(path, asyncio.Lock()):
            size = rounded_up(size_bytes)
            if size > self._largest:
                refusal = self._look_ahead(size)
                if refusal:
                    return 0, refusal
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, grow, path, size), ""
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return 0, self._too_little(size)
                return 0, f"{path} cannot be made {in_words(size)} long: {error.strerror}"

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look_ahead(self, size: int) -> str:
        """What all workers of this host will take: said when the first one asks, refused when it is too much."""
        workers, free = self._workers(), self._free()
        if not self._has_told:
            self._has_told = True
            each = f"{workers} worker{'s' if workers != 1 else ''} x 2 x {in_words(size)}"
            self._say(
                f"commits take {in_words(2 * size * workers)} on this host ({each}), "
                f"{in_words(free + self._taken())} are free in {self._directory.base}"
            )
        if self._missing(size) > free:
            return self._too_little(size)
        self._largest = size
        return ""

    def _too_little(self, size: int) -> str:
        base, workers = self._directory.base, self._workers()
        missing, free = in_words(self._missing(size)), in_words(self._free())
        return (
            f"commits do not fit into --commit-dir {base} of host {self._host}: they need {missing} more (two buffers "
            f"of {in_words(size)} for each of {workers}), and {free} are free. Make the state smaller, choose another "
            f"--commit-dir, or give this one more room (mount -o remount,size=... {base}; docker run --shm-size=...)"
        )

    def _missing(self, size: int) -> int:
        """What is still to be taken, when each worker's two buffers get so long."""
        lengths = sorted(self._lengths(), reverse=True)[: 2 * self._workers()]
        return 2 * self._workers() * size - sum(min(size, length) for length in lengths)

    def _taken(self) -> int:
        return sum(self._lengths())

    def _lengths(self) -> list[int]:
        return [path.stat().st_size for path in Path(self._directory.path).glob("*.safetensors")]

    def _free(self) -> int:
        found = os.statvfs(self._directory.path)
        return found.f_bavail * found.f_frsize
