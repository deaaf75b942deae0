"""The directory of a job: locked by its driver, read by ``elasticrun status`` and the next driver, removed at the end.

It holds the driver's record, the job's id, and the sockets of the agents of this machine. Only this user may access it.
Driver and agents hold a shared lock on it while they live: a directory without a lock is stale. The driver alone holds
a second lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from elasticstate.commits import ID_FILE
from elasticstate.core.figures import NO_PAST, PastFigures
from elasticstate.core.ids import CommitId, HostSlots
from elasticstate.core.types import Placement, ShardLayout, World
from elasticstate.errors import OptionError
from elasticstate.options import Options, usable_runtime_directory
from elasticstate.private import is_still, open_directory, open_file, read_file, write_file

_RECORD = "driver.json"
_HISTORY = "history.json"
_DRIVER_LOCK = "driver.lock"
_LOCK_TIMEOUT_S = 0.2  # another process may lock the directory for a moment, to check if the job is dead
_LONGEST_BYTES = 107 - len("/agent-999-99999")  # the kernel's limit for the path of a Unix socket


class JobIsRunningError(OSError):
    """Another driver has the lock on the job's name."""


class Record(msgspec.Struct, frozen=True):
    """Facts that a driver needs to reattach, and cannot get from the agents.

    The record is written before its content takes effect: a generation that is not in it was never published.
    """

    job: str
    job_id: str
    epoch: int  # counts the drivers of the job, from 1
    token: str
    ports: tuple[int, ...]  # where the agents dial in: of the loopback interface, then of all interfaces
    options: Options
    directory: str  # working directory in which the job was started
    hosts: tuple[HostSlots, ...] = ()  # discovery's last answer
    agents: tuple[str, ...] = ()  # hosts with an agent
    world: World | None = None  # the newest world
    ages: tuple[int, ...] = ()  # of its members, by rank
    next_age: int = 0
    highest: CommitId | None = None  # newest commit with tick >= 1 that was reported
    first_round: tuple[Placement, ...] = ()  # workers that started together; it is not known if they use ``run``
    restarts: int = 0  # failed worlds of plain workers
    layouts: tuple[ShardLayout, ...] = ()  # of a sharded job: of the generations whose commits may be the line
    replicated: CommitId | None = None  # the newest commit whose replication is complete
    past: PastFigures = NO_PAST  # when the record was written, by the core's clock
    clocks: tuple[float, float] = (0.0, 0.0)  # at that time: the core's clock, and Unix time
    dashboard_port: int = 0  # 0: no dashboard yet
    is_over: bool = False  # the job has ended and its commits are being removed: no driver may reattach

    @property
    def address(self) -> str:
        """Address at which ``elasticrun status`` asks."""
        return f"127.0.0.1:{self.ports[0]}"


def _path_of(job: str) -> Path:
    return usable_runtime_directory() / f"elasticstate-{os.getuid()}-{job}"


class JobDirectory:
    """The job's directory, locked by its driver. Raises OptionError if a living driver has it, or it cannot be made.

    ``found``: the record of a driver that died before the end of its job; None: the job is new. A driver that died
    while it cleaned up after the end of its job leaves nothing to reattach to. ``seen_at``: Unix time of the last sign
    of life of an earlier driver.
    """

    seen_at = 0.0

    def __init__(self, job: str) -> None:
        self.path = _path_of(job)
        if len(os.fsencode(self.path)) > _LONGEST_BYTES:
            raise OptionError(
                f"--job-name: {job!r}: too long: the kernel limits the paths of sockets, which are in {self.path}. "
                "Choose a shorter name."
            )
        try:
            self._lock, self._driver_lock, self.seen_at = self._take_lock()
        except JobIsRunningError as error:
            raise OptionError(
                f"--job-name: {job!r}: a job of this name is already running: {error}. Choose another name, or see its "
                f"state with elasticrun status {job}."
            ) from None
        except OSError as error:
            raise OptionError(
                f"--job-name: {job!r}: the directory {self.path} cannot be used: {error}. Choose another name, or "
                "remove the directory."
            ) from None
        last = _read(self.path)
        self.found = None if last is None or last.is_over else last
        if self.found is None:
            self._clear(job, is_readable=last is not None)

    def write_id(self, job_id: str) -> None:
        """Write the id of the job that has the directory from now on."""
        write_file(self._lock, ID_FILE, job_id.encode())

    def write(self, record: Record) -> None:
        """Replace the record. A reader sees either the old record or the new one."""
        write_file(self._lock, _RECORD, msgspec.json.encode(record))

    def write_history(self, data: bytes) -> None:
        """Replace the history of the job, which the next driver's dashboard continues. Raises OSError."""
        write_file(self._lock, _HISTORY, data)

    def history(self) -> bytes:
        """Return the history of the job; empty if there is none."""
        try:
            return read_file(self._lock, _HISTORY)
        except OSError:
            return b""

    def sign_of_life(self) -> None:
        """Record that the driver lives, for the next driver."""
        with suppress(OSError):  # the file system may have become read-only
            os.utime(self._driver_lock)

    def forget(self) -> None:
        """Remove the record, if possible."""
        with suppress(OSError):  # the file system may have become read-only
            os.unlink(_RECORD, dir_fd=self._lock)

    @property
    def is_lost(self) -> bool:
        """Return True if the directory was deleted or renamed, so that no process finds the record there."""
        return not is_still(self.path, self._lock)

    def make_anew(self, record: Record) -> None:
        """Create the directory again, with this record. Raises OSError if its name is taken by now."""
        lock, driver_lock, _ = self._take_lock()
        self._unlock()
        self._lock, self._driver_lock = lock, driver_lock
        self.write_id(record.job_id)
        self.write(record)

    def give_back(self) -> None:
        """Release the directory, in the state in which it was found."""
        if self.found is None:
            self.remove()
        else:
            self._unlock()

    def remove(self) -> None:
        if not self.is_lost:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        os.close(self._driver_lock)
        os.close(self._lock)

    def _take_lock(self) -> tuple[int, int, float]:
        """Create or take over the directory. Return the locked descriptors of directory and driver's lock file, and the
        last sign of life of an earlier driver."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            lock = open_directory(self.path)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if is_still(self.path, lock):
                    return lock, *_take_driver_lock(lock)
            except (BlockingIOError, FileNotFoundError):  # the directory is being removed
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            time.sleep(0.01)

    def _clear(self, job: str, is_readable: bool) -> None:
        """Remove the files of a driver that died before it wrote a record, or after the end of its job."""
        if not is_readable and (self.path / _RECORD).exists():
            self._unlock()
            raise OptionError(
                f"--job-name: {job!r}: the record of an earlier job in {self.path} cannot be read. Install the version "
                "of elasticstate that started that job, or remove the directory to start a new job."
            )
        for entry in self.path.iterdir():
            if entry.name != _DRIVER_LOCK and (entry.is_symlink() or not entry.is_dir()):
                entry.unlink()


def _take_driver_lock(directory: int) -> tuple[int, float]:
    fd = open_file(directory, _DRIVER_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 20).decode(errors="replace")
        os.close(fd)
        raise JobIsRunningError(f"its driver is process {pid}") from None
    seen_at = os.fstat(fd).st_mtime
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd, seen_at


def _read(path: Path) -> Record | None:
    try:
        directory = open_directory(path)
    except OSError:
        return None
    try:
        return msgspec.json.decode(read_file(directory, _RECORD), type=Record)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(directory)


def find_job(job: str) -> Record | None:
    """Return the record of a job of this user, or None. Raises OptionError if the runtime directory is unusable."""
    return _read(_path_of(job))
