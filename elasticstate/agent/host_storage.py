"""The files of the slots of one host, kept open for as long as their agent lives, and given to the workers.

Workers receive descriptors, not names, so a commit outlives the deletion of its file (docs/decisions/commits.md). Then
the agent makes a new directory and moves each slot there: it copies the newest commit while no process writes to it. A
slot without a worker moves at once. A worker sees a flag in its control page, and requests new files at its next
commit.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from elasticstate import commits
from elasticstate._native import ControlPage
from elasticstate.agent.host_job import HostJob
from elasticstate.agent.supervisor import sealed_commits, seals_of
from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.errors import CommitStorageError
from elasticstate.machine import format_bytes
from elasticstate.net import messages
from elasticstate.net.link import AgentSocket, WorkerConnection
from elasticstate.private import make_file
from elasticstate.replicas.store import ReplicaStore
from elasticstate.threads import in_thread

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

    def __init__(self, directory: commits.CommitDirectory, job_id: str, host: str, log: Callable[[str], None]) -> None:
        self.directory = directory
        self._job_id = job_id
        self.host = host
        self.log = log
        self._slots: dict[int, SlotFiles] = {}
        self._results: dict[int, int] = {}
        for slot in directory.slots():
            with suppress(OSError, ValueError):  # the previous agent died while it created the page
                self._slots[slot] = self._open(slot, self.directory.open_file)
                self._results[slot] = directory.open_file(commits.result_file(slot), os.O_RDWR)

    def close(self) -> None:
        for files in self._slots.values():
            files.close()
        for fd in self._results.values():
            os.close(fd)
        self._slots.clear()
        self._results.clear()

    def owner(self, slot: int) -> bytes:
        return commits.owner_of(self._job_id, self.host, slot)

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
            _allocate_page(opened[0], self.directory.path / commits.control_file(slot))
            return SlotFiles(opened[0], (opened[1], opened[2]))
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise

    # ------------------------------------------------------------------------------------------ results of launch()

    def make_result(self, slot: int) -> int:
        """Create an empty file for the result of the slot's next worker. Raises OSError."""
        fd = make_file(self.directory.fd, commits.result_file(slot))
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
        except (OSError, ValueError, CommitStorageError) as error:
            if new is not None:
                self._discard(slot, new)
            old.page.set_stale(False)
            self.log(
                f"the commits of slot {slot} cannot be copied to {self.directory.path} ({error}). This agent keeps "
                "them in memory. They are lost if it ends together with the worker."
            )
            return
        if not is_idle() or self._slots[slot] is not old:
            self._discard(slot, new)
            return
        self._slots[slot] = new
        if newest is not None:
            self.log(f"commit {newest} of slot {slot} was copied to {self.directory.path}")
        old.close()

    def _discard(self, slot: int, files: SlotFiles) -> None:
        files.close()
        for name in _names(slot):
            with suppress(OSError):
                os.unlink(name, dir_fd=self.directory.fd)


def _names(slot: int) -> tuple[str, str, str]:
    return commits.control_file(slot), commits.buffer_file(slot, 0), commits.buffer_file(slot, 1)


def _allocate_page(fd: int, path: object) -> None:
    try:
        # Without blocks, a write to the page would raise SIGBUS when the file system is full.
        os.posix_fallocate(fd, 0, PAGE_BYTES)
    except OSError as error:
        raise CommitStorageError(f"cannot allocate {path}: {error.strerror}") from None


def _copy_newest(old: SlotFiles, new: SlotFiles, owner: bytes) -> CommitId | None:
    """Copy the newest commit; write its seal last. Return its id; None if there is no commit. OSError, ValueError."""
    seals = seals_of(old.page, owner)
    if not seals:
        return None
    index = list(seals)[-1]
    length = os.fstat(old.buffers[index]).st_size
    commits.grow(new.buffers[index], length)
    copy_bytes(old.buffers[index], new.buffers[index], 0, length)
    new.page.seal(index, owner, *seals[index])
    return CommitId(*seals[index][:2])


def copy_bytes(source: int, target: int, offset: int, length: int) -> None:
    """Copy the first bytes of a file to their place in another one, without a position that other threads share.

    Raises OSError, or ValueError if the source is shorter.
    """
    own = os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.lseek(own, offset, os.SEEK_SET)
        at = 0
        while at < length:
            copied = os.sendfile(own, source, at, length - at)
            if not copied:
                raise ValueError(f"the buffer ends before {length} bytes")
            at += copied
    finally:
        os.close(own)


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
    """Allocates commit storage: files get their full length, with all their blocks, before a worker maps them.

    So a full commit directory causes an error that names the bytes, and never a SIGBUS in a worker. It is done in a
    thread, because to allocate a block costs as much as to write it: seconds for each GB.

    ``workers()`` returns the number of workers of this host that keep commits. The log gets a line on the need, at the
    first tick of a worker and when the need has grown. ``copies``: the store of kept copies in the directory; it may
    free memory that nobody needs.
    """

    def __init__(self, storage: HostStorage, workers: Callable[[], int], copies: ReplicaStore | None = None) -> None:
        self._storage = storage
        self._workers = workers
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
            return await loop.run_in_executor(self._threads, commits.grow, fd, size), ""
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return 0, self._too_little(size)
            path = self._storage.directory.path / commits.buffer_file(slot, index)
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
        ours = sum(512 * found.st_blocks for found in self._stats())  # one may be growing: its length is set at the end
        available = self._free() + ours + (self._store.size_bytes() if self._store is not None else 0)
        text = f"commits {verb} {format_bytes(need)}{so_far} on this host ({each}); {format_bytes(available)} are free"
        self._storage.log(
            f"{text} in {self._storage.directory.base}{', which is too little' if need > available else ''}"
        )

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
            f"commits do not fit into --commit-dir {base} of host {self._storage.host}: they need {needed} more (two "
            f"buffers of {format_bytes(size)} for each of {workers}), and {free} are free. Make the state smaller, "
            f"choose another --commit-dir, or enlarge this one "
            f"(mount -o remount,size=... {base}; docker run --shm-size=...)"
        )

    def _bytes_to_allocate(self, size: int, workers: int) -> int:
        """Return the bytes still to be allocated when each worker's two buffers get this long."""
        lengths = sorted((found.st_size for found in self._stats()), reverse=True)[: 2 * workers]
        return 2 * workers * size - sum(min(size, length) for length in lengths)

    def _stats(self) -> list[os.stat_result]:
        return [os.fstat(fd) for files in self._storage.slots().values() for fd in files.buffers]

    def _free(self) -> int:
        found = os.statvfs(self._storage.directory.fd)
        return found.f_bavail * found.f_frsize


_REMEDY = (
    "systemd-logind deletes the files of a user whose last session has ended. Run loginctl enable-linger, or set "
    "RemoveIPC=no in logind.conf."
)
_PART_BYTES = 1 << 20
_LOST = 1  # size sent without data: the driver then reports the result as lost
_LOOK_INTERVAL_S = 0.25


class Supply:
    """Gives workers their files."""

    def __init__(self, job: HostJob, storage: HostStorage, copies: ReplicaStore) -> None:
        self._job = job
        self._storage = storage
        self._copies = copies
        self._results = Results(job.key)
        self._call = _in_memory(job.spec.call) if job.spec.call else None
        self._fault = ""  # error of the last attempt to create a new directory

    def give(self, request: messages.RequestStorage, connection: WorkerConnection) -> None:
        """Answer a worker that requests its files: at boot, or at a commit after the files have lost their names.

        Or it requests the commits of another slot, or a kept copy, which it only reads.
        """
        if request.copy is not None:
            self._job.begin(self._give_copy(*request.copy, connection))
        elif request.peer is None:
            self._job.begin(self._give(request.worker, connection))
        else:
            self._give_peer(request, connection)

    def _give_peer(self, request: messages.RequestStorage, connection: WorkerConnection) -> None:
        """Give the files of the slot that a worker wants to read: of another living worker."""
        living = {worker.slot for worker in self._job.handles if worker.slot != request.worker.slot}
        slots, owner = self._storage.slots(), self._storage.owner
        newest = {slot: sealed_commits(slots[slot].page, owner(slot))[0] for slot in living if slot in slots}
        held = {slot: commit for slot, commit in newest.items() if commit is not None}
        slot = request.peer if request.peer in living else -1
        if request.peer == -1 and held:
            slot = min(held, key=lambda slot: (-held[slot].generation, -held[slot].tick, slot))
        files = slots.get(slot)
        connection.give(messages.Storage(self._job.key, False, slot), files.descriptors if files is not None else [])

    async def _give_copy(self, slot: SlotId, commit: CommitId, connection: WorkerConnection) -> None:
        try:
            found = await in_thread(self._copies.share, slot, commit)
        except OSError:  # no descriptor is left: the worker reads from the copy server
            found = None
        fd, content = found if found is not None else (None, None)
        connection.give(messages.Storage(self._job.key, False, content=content), [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)

    async def _give(self, worker: WorkerId, connection: WorkerConnection) -> None:
        handle = self._job.handles[worker]
        if self._storage.files(worker.slot).page.is_stale:
            handle.waits += 1
            try:
                await self._storage.move(worker.slot, lambda: self._job.handles.get(worker) is handle)
            finally:
                handle.waits -= 1
        result = self._storage.result(worker.slot)
        if self._job.handles.get(worker) is handle and result is not None:
            files = self._storage.files(worker.slot)
            handle.liveness.storage_is(files.page)
            given = [*files.descriptors, result, *([] if self._call is None else [self._call])]
            connection.give(messages.Storage(self._job.key, self._call is not None), given)

    async def send_result(self, slot: int, offset: int) -> None:
        """Send a part of the result that a worker of ``launch()`` has returned."""
        self._job.driver.send(await in_thread(self._results.part, self._storage.result(slot), slot, offset))

    async def watch_files(self, socket: AgentSocket) -> None:
        """Look regularly, until cancelled, if files of this agent were deleted, and create them again."""
        place, used = self._job.place, self._storage.directory.fd
        while True:
            self._check_commits()
            directory = self._storage.directory.fd
            with suppress(OSError):  # retried at the next look
                if directory != used:
                    self._copies.move_to(directory)
                    used = directory
            with suppress(OSError):
                if place.is_lost or socket.is_lost:
                    if place.is_lost:
                        place.make_anew()
                    socket.reopen(place.socket)
                    self._job.warn(
                        f"the socket of this agent was deleted while the job runs. The new one is {place.socket}. "
                        f"{_REMEDY}"
                    )
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _check_commits(self) -> None:
        """Check if commits have been deleted since the last call. If so, warn, and move the slots without a worker."""
        directory = self._storage.directory
        before = directory.path
        try:
            if not self._storage.detect_loss():
                return
        except (OSError, CommitStorageError) as error:
            if self._fault != str(error):
                self._fault = str(error)
                self._job.warn(f"{before} was deleted, and cannot be created again ({error}). {_REMEDY}")
            return
        self._fault = ""
        taken = "" if directory.path == before else f", {directory.path}, because another user has taken the name"
        self._job.warn(
            f"commits were deleted from {before} while the job runs. Workers and agent still hold them, and write the "
            f"next commits to a new directory{taken}. {_REMEDY}"
        )
        inhabited = {worker.slot for worker in self._job.handles}
        for slot in self._storage.slots():
            if slot not in inhabited:
                self._job.begin(self._storage.move(slot, partial(self._is_empty, slot)))

    def _is_empty(self, slot: int) -> bool:
        return all(worker.slot != slot for worker in self._job.handles)


def _in_memory(data: bytes) -> int:
    """Return the descriptor of a file without a name that holds this data."""
    fd = os.memfd_create("elasticstate-call", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


class Results:
    """Results of the workers of one host for ``launch()``, which the driver fetches part by part.

    The file of a result begins with a keyed checksum of the rest, which the worker writes last. So a result is known to
    be complete, and written by a worker of this job, before anything unpickles it. ``key``: of the job's storage.
    """

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
        return messages.Fetched(slot, offset, os.pread(fd, _PART_BYTES, commits.RESULT_HEAD_BYTES + offset), size)

    def _verified_size(self, fd: int) -> int:
        """Return the size; 0 if nothing was returned; -1 if no worker of this job has written the file."""
        size = os.fstat(fd).st_size - commits.RESULT_HEAD_BYTES
        if size < 0:
            return 0 if size == -commits.RESULT_HEAD_BYTES else -1
        hasher = commits.result_hasher(self._key)
        at = commits.RESULT_HEAD_BYTES
        while data := os.pread(fd, _PART_BYTES, at):
            hasher.update(data)
            at += len(data)
        return size if hmac.compare_digest(os.pread(fd, commits.RESULT_HEAD_BYTES, 0), hasher.digest()) else -1
