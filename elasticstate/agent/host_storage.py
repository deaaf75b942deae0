"""The files of the slots of one host, kept open for as long as their agent lives.

Workers receive descriptors, not names. So a commit outlives the deletion of its file: as long as the agent lives, the
next worker of the slot resumes from it. But after all processes have ended, only a file with a name can be found.

Names can be lost: systemd-logind deletes all files of a user in /dev/shm when the user's last session ends. Then the
agent makes a new directory and moves each slot there: it copies the newest commit while no process writes to it. A slot
without a worker moves at once. A worker sees a flag in its control page, and requests new files at its next commit.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from elasticstate._native import ControlPage
from elasticstate.allocation import grow
from elasticstate.commits import CommitDirectory, buffer_file, control_file, owner_of, result_file
from elasticstate.core.types import CommitId
from elasticstate.errors import CommitStorageError
from elasticstate.private import make_file
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
