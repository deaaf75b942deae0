"""The directory of a job: claimed by its driver, read by ``elasticrun status`` and the next driver, removed at the end.

It holds the record of the driver, the job's id, and the sockets of the agents of this machine. Nobody else may look
into it. Driver and agents lock it (shared) for as long as they live: what nobody locks was left behind. A second lock
is the driver's alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

import msgspec

from elasticstate.commits import ID_FILE
from elasticstate.config import Options, runtime_directory
from elasticstate.core.types import CommitId, HostSlots, World
from elasticstate.errors import OptionError

_RECORD = "driver.json"
_DRIVER_LOCK = "driver.lock"
_LOCK_TIMEOUT_S = 0.2  # somebody may look whether this job is dead, and locks its directory for that
_LONGEST_BYTES = 107 - len("/agent-999-99999")  # what the kernel takes as the path of a Unix socket


class Record(msgspec.Struct, frozen=True):
    """What a driver has to know that takes over from one that has died, and cannot learn from the agents.

    Written before what it tells of is done: a generation that is not in it was never published.
    """

    job: str
    job_id: str
    epoch: int  # counts the drivers of the job, from 1
    token: str
    ports: tuple[int, ...]  # where the agents dial in: of the loopback interface, then of all
    options: Options
    directory: str  # in which the job was started
    hosts: tuple[HostSlots, ...] = ()  # discovery's last answer
    agents: tuple[str, ...] = ()  # hosts with an agent
    world: World | None = None  # the newest one
    ages: tuple[int, ...] = ()  # of its members, by rank
    next_age: int = 0
    highest: CommitId | None = None  # the newest commit of a user that was heard of

    @property
    def address(self) -> str:
        """Where ``elasticrun status`` asks."""
        return f"127.0.0.1:{self.ports[0]}"


def _path_of(job: str) -> Path:
    return runtime_directory() / f"elasticstate-{os.getuid()}-{job}"


class JobDirectory:
    """Claims the job's name. Raises OptionError when a living driver has it.

    ``found``: the record of a driver that has died without having ended its job; None: the job is new.
    """

    def __init__(self, job: str) -> None:
        self.path = _path_of(job)
        if len(os.fsencode(self.path)) > _LONGEST_BYTES:
            raise OptionError(f"--job-name: {job!r}: takes a shorter one: sockets have no room below {self.path}")
        try:
            self._lock = self._claim()
        except OSError as error:
            raise OptionError(f"--job-name: {job!r}: takes the name of no running job ({error})") from None
        self.found = _read(self.path)
        if self.found is None:
            self._clear(job)

    def write_id(self, job_id: str) -> None:
        """Whose directory it is from now on."""
        self._write(ID_FILE, job_id.encode())

    def write(self, record: Record) -> None:
        """Replace the record: whoever reads it sees the old one or the new one."""
        self._write(_RECORD, msgspec.json.encode(record))

    def forget(self) -> None:
        """There is no record."""
        (self.path / _RECORD).unlink(missing_ok=True)

    def give_back(self) -> None:
        """It is as it was found."""
        if self.found is None:
            self.remove()
        else:
            self._unlock()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        os.close(self._driver_lock)
        os.close(self._lock)

    def _claim(self) -> int:
        """Make the directory or take it over; returns the descriptor that locks it."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            if not _is_ours(self.path):
                self.path.mkdir(mode=0o700)
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), self.path.lstat()):
                    self._driver_lock = self._take_driver_lock()
                    return lock
            except (BlockingIOError, FileNotFoundError):  # it is being removed
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            time.sleep(0.01)

    def _take_driver_lock(self) -> int:
        fd = os.open(self.path / _DRIVER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 20).decode(errors="replace")
            os.close(fd)
            raise PermissionError(f"its driver is process {pid}") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd

    def _clear(self, job: str) -> None:
        """What a driver has left that died before it had a record."""
        if (self.path / _RECORD).exists():
            self._unlock()
            raise OptionError(
                f"--job-name: {job!r}: what its last driver has left in {self.path} cannot be read: install the "
                "version of elasticstate that it was started with, or remove that directory to begin anew"
            )
        for entry in self.path.iterdir():
            if entry.name != _DRIVER_LOCK:
                entry.unlink()

    def _write(self, name: str, data: bytes) -> None:
        new = self.path / f"{name}.new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
        new.replace(self.path / name)


def _is_ours(path: Path) -> bool:
    """A directory of this user that nobody else can write to or read."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _read(path: Path) -> Record | None:
    try:
        return msgspec.json.decode((path / _RECORD).read_bytes(), type=Record)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def find_job(job: str) -> Record | None:
    """The record of a job of this user; None if there is none."""
    path = _path_of(job)
    return _read(path) if _is_ours(path) else None
