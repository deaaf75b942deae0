"""The files of the slots of one host, kept open for as long as their agent lives.

Workers receive descriptors, not names. So a commit outlives the deletion of its file: as long as the agent lives, the
next worker of the slot resumes from it. But after all processes have ended, only a file with a name can be found.

Names can be lost: systemd-logind deletes all files of a user in /dev/shm when the user's last session ends. Then the
agent makes a new directory and moves each slot there: it copies the newest commit while no process writes to it. A slot
without a worker moves at once. A worker sees a flag in its control page, and requests new files at its next commit.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from elasticstate._native import ControlPage
from elasticstate.commits import (
    CommitDirectory,
    buffer_file,
    control_file,
    grow,
    owner_of,
    result_file,
)
from elasticstate.core.ids import CommitId
from elasticstate.errors import CommitStorageError
from elasticstate.machine import format_bytes
from elasticstate.private import make_file
from elasticstate.threads import in_thread

if TYPE_CHECKING:
    from elasticstate.replicas.store import ReplicaStore


PAGE_BYTES = 4096


class SlotFiles:
    """The control page and the two buffers of a slot."""

    def __init__(self, page: int, buffers: tuple[int, int]) -> None:
        """Take ownership of the descriptors. Raises OSError, or ValueError if the page is invalid."""
        self.buffers = buffers
        self._page_fd = page
        self.page = ControlPage(page)
        self.is_lost = False  # the files have lost their names
        self._closing = threading.Lock()
        self._is_closed = False

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the page, buffer 0 and buffer 1."""
        return [self._page_fd, *self.buffers]

    def have_names(self) -> bool:
        return all(os.fstat(fd).st_nlink for fd in self.descriptors)

    def duplicate(self, index: int) -> int:
        """Return a new descriptor of a buffer. Safe on any thread. Raises OSError when the files are closed."""
        with self._closing:
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return os.dup(self.buffers[index])

    def close(self) -> None:
        """Close the descriptors. Processes that have mapped the files keep their mappings."""
        with self._closing:
            self._is_closed = True
            for fd in self.descriptors:
                os.close(fd)


class HostStorage:
    """Files of all slots of one host. ``log`` gets a line when files were lost, or a commit could not be copied."""

    def __init__(self, directory: CommitDirectory, job_id: str, host: str, log: Callable[[str], None]) -> None:
        self.directory = directory
        self._job_id = job_id
        self._host = host
        self._log = log
        self._slots: dict[int, SlotFiles] = {}
        self._results: dict[int, int] = {}
        for slot in directory.slots():
            with suppress(OSError, ValueError):  # the previous agent died while it created the page
                self._slots[slot] = self._open(slot, self.directory.open_file)
                self._results[slot] = directory.open_file(result_file(slot), os.O_RDWR)

    def close(self) -> None:
        for files in self._slots.values():
            files.close()
        for fd in self._results.values():
            os.close(fd)
        self._slots.clear()
        self._results.clear()

    def owner(self, slot: int) -> bytes:
        return owner_of(self._job_id, self._host, slot)

    def slots(self) -> dict[int, SlotFiles]:
        """Files of each slot that has ever had a worker on this host."""
        return self._slots

    def files(self, slot: int) -> SlotFiles:
        """Return the files of a slot. Create them if they do not exist.

        Raises CommitStorageError when the file system has no space for the page, OSError, or ValueError for an invalid
        page.
        """
        if slot not in self._slots:
            self._slots[slot] = self._open(slot, self.directory.open_file)
        return self._slots[slot]

    def _open(self, slot: int, open_file: Callable[[str, int], int]) -> SlotFiles:
        opened: list[int] = []
        try:
            opened.extend(open_file(name, os.O_RDWR | os.O_CREAT) for name in _names(slot))
            _allocate_page(opened[0], self.directory.path / control_file(slot))
            return SlotFiles(opened[0], (opened[1], opened[2]))
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise

    # ------------------------------------------------------------------------------------------ results of launch()

    def make_result(self, slot: int) -> int:
        """Create an empty file for the result of the slot's next worker. Raises OSError."""
        fd = make_file(self.directory.fd, result_file(slot))
        if slot in self._results:
            os.close(self._results[slot])
        self._results[slot] = fd
        return fd

    def result(self, slot: int) -> int | None:
        """Return the file with the result of a slot, or None if the slot never had a worker."""
        return self._results.get(slot)

    # --------------------------------------------------------------------------------------------- names that are lost

    def detect_loss(self) -> bool:
        """Return True if the directory, or names of files, have been lost since the last call.

        The control pages then carry the flag for the workers. Raises OSError when no new directory can be made: call
        again.
        """
        is_lost = self.directory.is_lost
        if is_lost:
            self.directory.make_anew()
        lost = [files for files in self._slots.values() if not files.is_lost and (is_lost or not files.have_names())]
        for files in lost:
            files.is_lost = True
            files.page.set_stale(True)
        return is_lost or bool(lost)

    async def move(self, slot: int, is_idle: Callable[[], bool]) -> None:
        """Give a slot new files that have names, and copy its newest commit into them.

        The new files are used only if ``is_idle()`` is still true after the copy: otherwise a worker may have written
        to the old ones. If the copy fails, for example for lack of space, the slot keeps its old files.
        """
        old = self._slots[slot]
        new = None
        try:
            new = self._open(slot, lambda name, _: make_file(self.directory.fd, name))
            newest = await in_thread(_copy_newest, old, new, self.owner(slot))
        except (OSError, CommitStorageError) as error:
            if new is not None:
                self._discard(slot, new)
            old.page.set_stale(False)
            self._log(
                f"the commits of slot {slot} cannot be copied to {self.directory.path} ({error}). This agent keeps "
                "them in memory. They are lost if it ends together with the worker."
            )
            return
        if not is_idle() or self._slots[slot] is not old:
            self._discard(slot, new)
            return
        self._slots[slot] = new
        if newest is not None:
            self._log(f"commit {newest} of slot {slot} was copied to {self.directory.path}")
        old.close()

    def _discard(self, slot: int, files: SlotFiles) -> None:
        files.close()
        for name in _names(slot):
            with suppress(OSError):
                os.unlink(name, dir_fd=self.directory.fd)


def _names(slot: int) -> tuple[str, str, str]:
    return control_file(slot), buffer_file(slot, 0), buffer_file(slot, 1)


def _allocate_page(fd: int, path: object) -> None:
    try:
        # Without blocks, a write to the page would raise SIGBUS when the file system is full.
        os.posix_fallocate(fd, 0, PAGE_BYTES)
    except OSError as error:
        raise CommitStorageError(f"cannot allocate {path}: {error.strerror}") from None


def _copy_newest(old: SlotFiles, new: SlotFiles, owner: bytes) -> CommitId | None:
    """Copy the newest commit; write its seal last. Return its id, or None if there is no commit. Raises OSError."""
    seals = {index: seal for index in (0, 1) if (seal := old.page.sealed(index, owner)) is not None}
    if not seals:
        return None
    index = max(seals, key=lambda index: seals[index][:2])
    length = os.fstat(old.buffers[index]).st_size
    grow(new.buffers[index], length)
    at = 0
    with os.fdopen(os.dup(new.buffers[index]), "r+b", buffering=0) as target:
        while at < length:
            copied = os.sendfile(target.fileno(), old.buffers[index], at, length - at)
            if not copied:
                raise OSError(f"buffer {index} was truncated below {length} bytes")
            at += copied
    new.page.seal(index, owner, *seals[index])
    return CommitId(*seals[index][:2])


# ---------------------------------------------------------------------------------------------------- storage allocator
# Allocation of commit storage: files get their full length, with all their blocks, before a worker maps them.
#
# So a full commit directory causes an error that names the bytes, and never a SIGBUS in a worker. To allocate a block
# costs as much as to write it: seconds for each GB. It is done in a separate thread, so heartbeats go on.


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
        copies: ReplicaStore | None = None,
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
