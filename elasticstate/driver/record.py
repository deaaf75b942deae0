"""The directory of a running job: claimed by its driver, read by ``elasticrun status``, removed at the end.

It holds the driver's record (address and token), the job's id, and the sockets of the agents of this machine. Nobody
else may look into it. Driver and agents lock it (shared) for as long as they live: what nobody locks was left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from elasticstate.commits import ID_FILE
from elasticstate.config import runtime_directory
from elasticstate.errors import OptionError

_RECORD = "driver.json"
_LOCK_TIMEOUT_S = 0.2  # somebody may look whether this job is dead, and locks its directory for that
_LONGEST_BYTES = 107 - len("/agent-99999")  # what the kernel takes as the path of a Unix socket


class Record(NamedTuple):
    """Where a driver is found."""

    address: str
    token: str


def _path_of(job: str) -> Path:
    return runtime_directory() / f"elasticstate-{os.getuid()}-{job}"


class JobDirectory:
    """Claims the job's name. Raises OptionError when a living job has it."""

    def __init__(self, job: str, job_id: str) -> None:
        self.path = _path_of(job)
        if len(os.fsencode(self.path)) > _LONGEST_BYTES:
            raise OptionError(f"--job-name: {job!r}: takes a shorter one: sockets have no room below {self.path}")
        try:
            if _is_ours(self.path):
                _remove_what_is_stale(self.path)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise OptionError(f"--job-name: {job!r}: takes the name of no running job ({error})") from None
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._write(ID_FILE, job_id.encode())

    def write(self, record: Record) -> None:
        self._write(_RECORD, msgspec.json.encode(record))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _write(self, name: str, data: bytes) -> None:
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:
            file.write(data)


def _remove_what_is_stale(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # noqa: PERF203
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                shutil.rmtree(path, ignore_errors=True)
                return
    finally:
        os.close(fd)


def _is_ours(path: Path) -> bool:
    """A directory of this user that nobody else can write to or read."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def find_job(job: str) -> Record | None:
    """The record of a job of this user; None if there is none."""
    path = _path_of(job)
    if not _is_ours(path):
        return None
    try:
        return msgspec.json.decode((path / _RECORD).read_bytes(), type=Record)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
