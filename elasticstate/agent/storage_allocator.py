"""Allocation of commit storage: files get their full length, with all their blocks, before a worker maps them.

So a full commit directory causes an error that names the bytes, and never a SIGBUS in a worker. To allocate a block
costs as much as to write it: seconds for each GB. It is done in a separate thread, so heartbeats go on.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from elasticstate.allocation import grow
from elasticstate.commits import buffer_file
from elasticstate.errors import CommitStorageError
from elasticstate.machine import format_bytes
from elasticstate.threads import in_thread

if TYPE_CHECKING:
    from elasticstate.agent.host_storage import HostStorage
    from elasticstate.copies.store import CopyStore

# Steps between two powers of two: a buffer is up to 1/16 larger than requested, and seldom has to grow again.
_STEPS = 16
_SMALLEST_STEP_BYTES = 1 << 16
_REPORTED_GROWTH = 1.4
_THREADS = 4


def rounded_up(size_bytes: int) -> int:
    """Round up to the next of 16 steps between two powers of two."""
    step = max(_SMALLEST_STEP_BYTES, (1 << max(0, size_bytes.bit_length() - 1)) // _STEPS)
    return -(-size_bytes // step) * step


class StorageAllocator:
    """Allocates commit storage in the commit directory of one host.

    ``workers()`` returns the number of workers of this host that keep commits. ``log`` gets a line on the need, at the
    first tick of a worker and when the need has grown. ``copies``: the store of kept copies in the directory; it may
    free memory that nobody needs.
    """

    def __init__(
        self,
        storage: HostStorage,
        host: str,
        workers: Callable[[], int],
        log: Callable[[str], None],
        copies: CopyStore | None = None,
    ) -> None:
        self._storage = storage
        self._host = host
        self._workers = workers
        self._log = log
        self._store = copies
        self._copies = 0  # kept for each worker: of the last replication, and the next
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="elasticstate-storage")
        self._locks: dict[tuple[int, int], asyncio.Lock] = {}
        self._largest = 0  # largest buffer size that was found to fit for all workers
        self._expected: dict[int, int] = {}  # by slot, buffer size with all that is foreseen
        self._is_known = True  # False: a commit may grow by an amount that cannot be foreseen
        self._has_ticked = False
        self._reported = 0  # bytes in the last line on the need

    async def make(self, slot: int, index: int, size_bytes: int, is_sealed: Callable[[int], bool]) -> tuple[int, str]:
        """Make buffer ``index`` of a slot at least this long. Return (its length, "") or (0, the error).

        A buffer that carries a seal holds a commit, and is never changed: its worker must remove the seal first.
        """
        async with self._locks.setdefault((slot, index), asyncio.Lock()):
            if is_sealed(index):
                return 0, f"buffer {index} of slot {slot} carries a sealed commit"
            size = rounded_up(size_bytes)
            found, error = await self._allocate(slot, index, size)
            if error and await self._release_spare():
                return await self._allocate(slot, index, size)
            return found, error

    async def _allocate(self, slot: int, index: int, size: int) -> tuple[int, str]:
        if size > self._largest:
            refusal = self._check_space(size)
            if refusal:
                return 0, refusal
        fd = os.dup(self._storage.files(slot).buffers[index])  # the slot may get other files meanwhile
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, grow, fd, size), ""
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return 0, self._too_little(size)
            path = self._storage.directory.path / buffer_file(slot, index)
            return 0, f"{path} cannot be enlarged to {format_bytes(size)} long ({error.strerror})"
        finally:
            os.close(fd)

    async def reserve(self, slot: int, size_bytes: int, is_sealed: Callable[[int], bool]) -> None:
        """Make both buffers of a slot at least this long while its worker boots.

        A retained commit stays as it is, and its buffer grows when the worker overwrites it.
        """
        await asyncio.gather(*(self.make(slot, index, size_bytes, is_sealed) for index in (0, 1)))

    async def check_fits(self, slot: int, size_bytes: int) -> None:
        """Raise CommitStorageError if there is too little memory for both buffers of a slot that has no worker yet."""
        size = rounded_up(size_bytes)
        if self._lacks(slot, size) and not (await self._release_spare() and not self._lacks(slot, size)):
            raise CommitStorageError(self._too_little(size, self._workers() + 1))

    async def _release_spare(self) -> bool:
        if self._store is None:
            return False
        has_released: bool = await in_thread(self._store.release_spare)
        return has_released

    # ----------------------------------------------------------------------------------------------- line on the need

    def expect(self, slot: int, size_bytes: int, to_come: int | None) -> None:
        """Record the size of a worker's commit, and what will be added (see ``CommitSize``)."""
        self._expected[slot] = rounded_up(size_bytes + (to_come or 0))
        self._is_known = to_come is not None
        self._report()

    def begin_ticks(self) -> None:
        """Record that a worker has completed a tick: attached values are known from now on."""
        self._has_ticked = True
        self._report()

    def keep_copies(self, number: int) -> None:
        """Record that copies of commits are kept: this number for each replicated commit."""
        workers = max(1, self._workers())
        self._copies = max(self._copies, 2 * -(-number // workers))
        self._report()

    def _report(self) -> None:
        """Report the need, once it is known, and when it has grown. The first commit of a job has no attached values
        and no state of optimizers yet, so nothing is said before a tick is complete."""
        workers, size = self._workers(), max(self._expected.values(), default=0)
        need = (2 + self._copies) * size * workers
        if not self._has_ticked or need <= _REPORTED_GROWTH * self._reported:
            return
        verb = "now need" if self._reported else "need"
        self._reported = need
        so_far = "" if self._is_known else " so far"
        each = f"{workers} worker{'s' if workers != 1 else ''} x {2 + self._copies} x {format_bytes(size)}"
        each += f", {self._copies} of them for --replicas" if self._copies else ""
        available = self._free() + self._allocated() + (self._store.size_bytes() if self._store is not None else 0)
        text = f"commits {verb} {format_bytes(need)}{so_far} on this host ({each}); {format_bytes(available)} are free"
        self._log(f"{text} in {self._storage.directory.base}{', which is too little' if need > available else ''}")

    # ------------------------------------------------------------------------------------------------------- helpers

    def _lacks(self, slot: int, size: int) -> bool:
        lengths = (os.fstat(fd).st_size for fd in self._storage.files(slot).buffers)
        return sum(max(0, size - length) for length in lengths) > self._free()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_space(self, size: int) -> str:
        """Return why storage for all workers of this host is too small, or ""."""
        workers, free = self._workers(), self._free()
        if self._bytes_to_allocate(size, workers) > free:
            return self._too_little(size)
        self._largest = size
        return ""

    def _too_little(self, size: int, workers: int | None = None) -> str:
        base, workers = self._storage.directory.base, self._workers() if workers is None else workers
        # 0 left to allocate: with --one-copy-per-host, buffers of an earlier keeper exist beside those of the new one.
        needed, free = format_bytes(self._bytes_to_allocate(size, workers) or size), format_bytes(self._free())
        return (
            f"commits do not fit into --commit-dir {base} of host {self._host}: they need {needed} more (two buffers "
            f"of {format_bytes(size)} for each of {workers}), and {free} are free. Make the state smaller, choose "
            f"another --commit-dir, or enlarge this one "
            f"(mount -o remount,size=... {base}; docker run --shm-size=...)"
        )

    def _bytes_to_allocate(self, size: int, workers: int) -> int:
        """Return the bytes still to be allocated when each worker's two buffers get this long."""
        lengths = sorted(self._lengths(), reverse=True)[: 2 * workers]
        return 2 * workers * size - sum(min(size, length) for length in lengths)

    def _allocated(self) -> int:
        return sum(self._lengths())

    def _lengths(self) -> list[int]:
        return [os.fstat(fd).st_size for files in self._storage.slots().values() for fd in files.buffers]

    def _free(self) -> int:
        found = os.statvfs(self._storage.directory.fd)
        return found.f_bavail * found.f_frsize
