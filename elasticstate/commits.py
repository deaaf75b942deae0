"""The commit directory of a job on one host: where commits live, so that they outlive workers and agents.

::

    /dev/shm/elasticstate-<uid>-<job id>-<host>/    made, and locked for as long as it lives, by the agent of the host
        job                    names the directory of the job, which its driver and its agents lock (driver/record.py);
                               then process id and socket of the agent, by which its workers are known;
                               its time of modification lies ahead: until then all of this is kept
        0.control              slot 0: the page that worker and agent share
        0.0.safetensors        its two buffers, written in turn
        0.1.safetensors
        0.error                by which exception its worker has ended (error_file.py)
        call                   of launch(): the function and its arguments (worker/call.py)
        0.result               what it has returned

Whose agent has died may be given another one, so an unlocked directory is left behind only if its job is over, too:
nobody locks the job's directory, and that for ``--driver-timeout``; or that is another job's by now.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elasticstate import processes
from elasticstate.config import socket_variable
from elasticstate.errors import CommitSpaceError

ID_FILE = "id"
"""In the job's directory: the unique id of the job that has it now."""

PAGE_BYTES = 4096
_JOB_FILE = "job"
_PREFIX = "elasticstate-"


def owner_of(job_id: str, host: str, slot: int) -> bytes:
    """Whose commits those of a slot are: 16 bytes, in each of its seals."""
    return hashlib.sha256(f"{job_id}/{host}/{slot}".encode()).digest()[:16]


def control_file(prefix: str) -> str:
    """The page of the slot whose files begin with ``prefix``."""
    return f"{prefix}.control"


def buffer_file(prefix: str, index: int) -> str:
    """Buffer 0 or 1 of that slot."""
    return f"{prefix}.{index}.safetensors"


def result_file(prefix: str) -> str:
    """Where a worker of ``launch()`` puts what its function has returned."""
    return f"{prefix}.result"


def call_file(prefix: str) -> str:
    """What it is to call: the same for all slots of a host."""
    return str(Path(prefix).with_name("call"))


def refuse(base: str) -> str:
    """Why ``base`` cannot be a commit directory; "" when it can."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as error:
        return f"nothing can be made in it ({error.strerror})"
    return ""


class CommitDirectory:
    """The agent's side: made, or adopted from an agent before it, and locked until the end of this process."""

    def __init__(
        self,
        base: str,
        job_id: str,
        host: str,
        job_directory: str,
        socket: str,
        patience_s: float,
        keep_s: float,
        pause: Callable[[], bool] = lambda: _pause(),
    ) -> None:
        """An agent of this job that still has the host is given ``patience_s`` to end; then it is killed, with all its
        workers, and has as long again to be gone. ``socket``: by which those of this agent will be known. ``keep_s``:
        how long all is kept after the last ``keep()``, should all of the job die. ``pause()`` waits a moment; true:
        give up.

        Raises OSError when the directory cannot be made, or is another's.
        """
        self.base = Path(base).absolute()
        self.path = self.base / f"{_beginning_of(job_id)}{host}"
        self._lock = _claim(self.path, pause, patience_s)
        self._keep_s = keep_s
        (self.path / _JOB_FILE).write_text(f"{job_id} {Path(job_directory).absolute()}\n{os.getpid()} {socket}")
        self.keep()

    def keep(self) -> None:
        """For ``keep_s`` from now on nobody takes this for a leftover, whoever of the job may die."""
        now = time.time()
        with suppress(OSError):  # removed by hand
            os.utime(self.path / _JOB_FILE, (now, now + self._keep_s))

    def prefix(self, slot: int) -> str:
        """What the names of a slot's files begin with."""
        return str(self.path / str(slot))

    def slots(self) -> list[int]:
        """Those that have pages, made by this agent or by one before it."""
        return sorted(int(path.stem) for path in self.path.glob("*.control") if path.stem.isdecimal())

    def make_page(self, slot: int) -> str:
        """The path of a slot's page, made if it is not there yet. Raises CommitSpaceError when there is no room."""
        path = control_file(self.prefix(slot))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)  # or a write to it would be SIGBUS when the file system is full
        except OSError as error:
            raise CommitSpaceError(f"no room for {path}: {error.strerror}") from None
        finally:
            os.close(fd)
        return path

    def keep_call(self, data: bytes) -> None:
        """For the workers of ``launch()``. Raises OSError."""
        path = call_file(self.prefix(0))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)

    def remove(self) -> None:
        """At the end of the job: all commits of this host are gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def make_agent_directory(base: str) -> str:
    """A directory for the socket of an agent that has none of its driver's, locked until the end of this process.

    Raises OSError.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=_beginning_of("agent"), dir=base))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_still(path, fd):  # nobody took it for a leftover in between
            return str(path)
        os.close(fd)


def remove_agent_directories(base: str) -> None:
    """What agents that were killed have left of this kind."""
    for path in _directories(base, _beginning_of("agent")):
        with _locked(path) as locked:
            if locked:
                shutil.rmtree(path, ignore_errors=True)


def agent_on(base: str, job_id: str, host: str) -> tuple[int, str]:
    """The agent that this machine has, or had, for a host of a job: its process id (0 if it has ended), and the socket
    by which its workers are known ("" if there never was one)."""
    path = Path(base).absolute() / f"{_beginning_of(job_id)}{host}"
    with _locked(path) as has_ended:
        pid, socket = _agent_of(path)
        return 0 if has_ended else pid, socket


def remove_job(base: str, job_id: str) -> None:
    """What agents that were killed have left of a job that is over. Those that live remove theirs themselves."""
    for path in _directories(base, _beginning_of(job_id)):
        with _locked(path) as locked:
            if locked:
                shutil.rmtree(path, ignore_errors=True)


def remove_dead(base: str) -> list[str]:
    """Remove what dead jobs of this user have left in ``base``, and nothing of living ones; returns their paths."""
    removed = []
    for path in _directories(base, f"{_PREFIX}{os.getuid()}-"):
        with _locked(path) as locked:
            if locked and _bury_job(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(str(path))
    return removed


def remove_job_directory(path: str, lock: int) -> None:
    """By the last who has locked a job's directory, shared, through ``lock``: no other agent, and no driver."""
    if _try_lock(lock):
        shutil.rmtree(path, ignore_errors=True)


def _beginning_of(job_id: str) -> str:
    return f"{_PREFIX}{os.getuid()}-{job_id}-"


def _directories(base: str, beginning: str) -> list[Path]:
    """Directories of this user whose names begin so."""
    try:
        entries = sorted(Path(base).absolute().iterdir())
    except OSError:
        return []
    return [path for path in entries if path.name.startswith(beginning) and _is_ours(path)]


def _is_ours(path: Path) -> bool:
    """A directory of this user that nobody else can read or write."""
    try:
        return _is_private(path.lstat())
    except OSError:
        return False


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _pause() -> bool:
    time.sleep(0.01)
    return False


def _claim(path: Path, pause: Callable[[], bool], patience_s: float) -> int:
    """Make or adopt a directory; returns the descriptor that locks it."""
    deadline = time.monotonic() + patience_s
    evicted = False
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # somebody who looks for leftovers was quicker
            if not _is_private(path.lstat()):
                raise PermissionError(f"{path} is no directory of this user alone")
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if _try_lock(fd) and _is_still(path, fd):
                if evicted:
                    processes.kill_marked(*socket_variable(_agent_of(path)[1]))
                return fd
            if time.monotonic() > deadline and not evicted:
                _kill_holder(fd, _agent_of(path)[0])
                evicted, deadline = True, time.monotonic() + patience_s
            os.close(fd)
        if pause() or (evicted and time.monotonic() > deadline):
            raise TimeoutError(f"another agent has {path}")


def _agent_of(path: Path) -> tuple[int, str]:
    """The agent that has, or had, this directory: its process id, and the socket by which its workers are known."""
    try:
        pid, _, socket = (path / _JOB_FILE).read_text().splitlines()[1].partition(" ")
        return int(pid), socket
    except (OSError, ValueError, IndexError):
        return 0, ""


def _kill_holder(fd: int, agent: int) -> None:
    """SIGKILL to this process, if it has the lock on this directory (proc_locks(5)), and is not this very one."""
    found = os.fstat(fd)
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and inode in fields and int(fields[4]) == agent not in (0, os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(agent, signal.SIGKILL)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a directory for a moment; False: somebody else has it, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        yield _try_lock(fd) and _is_still(path, fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, fd: int) -> bool:
    """Whether the path still means what was opened: somebody may have removed it, and another may have made it anew."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _bury_job(path: Path) -> bool:
    """Whether the job that made this commit directory is over; then its own directory is removed."""
    file = path / _JOB_FILE
    try:
        kept_until = file.stat().st_mtime
        job_id, _, name = file.read_text().splitlines()[0].partition(" ")
    except (OSError, IndexError):
        return True
    directory = Path(name)
    if not _is_ours(directory):
        return time.time() > kept_until
    if _id_in(directory) not in ("", job_id):
        return True
    if time.time() <= kept_until:
        return False
    with _locked(directory) as locked:
        if locked:
            shutil.rmtree(directory, ignore_errors=True)
        return locked


def _id_in(directory: Path) -> str:
    """Of the job whose directory it is; "" if that is not written there yet."""
    try:
        return (directory / ID_FILE).read_text()
    except OSError:
        return ""
