"""Commit storage of a job on one host: a directory for commits, which outlive workers and agents; headers and seals.

::

    /dev/shm/elasticstate-<uid>-<job id>-<host>/    the agent of the host makes and locks it, until the agent ends
        job                    line 1: directory of the job, which its driver and its agents lock (driver/record.py);
                               line 2: process id of the agent, and the mark of the agent's workers;
                               time of modification: a time to come, until which the directory is kept
        0.control              slot 0: the control page that worker and agent share
        0.0.safetensors        its two buffers, written in turn
        0.1.safetensors
        0.error                exception that ended its worker (tracebacks.py)
        0.result               for launch(): result of its function (agent/host_storage.py)

The agent opens each of these files once and passes descriptors to its workers: no process looks up a name that another
user may have taken since (private.py). If another user has taken the name of the directory, the agent appends ``~1`` …

A host whose agent has died may get another agent. So an unlocked directory is stale only if its job is over: no process
has locked the directory of the job for ``--driver-timeout``, or another job has that directory now.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from elasticstate.private import is_private, is_still, open_directory, open_file, read_file, write_file

ID_FILE = "id"
"""Name of a file in the job's directory, with the unique id of the job that has the directory now."""

_JOB_FILE = "job"
_MOST_NAMES = 100  # names to try for one directory, if other users have taken the first ones
_PREFIX = "elasticstate-"


def owner_of(job_id: str, host: str, slot: int) -> bytes:
    """Return the owner of a slot's commits: 16 bytes, which each seal of the slot contains."""
    return hashlib.sha256(f"{job_id}/{host}/{slot}".encode()).digest()[:16]


def control_file(slot: int) -> str:
    """Return the name of the control page of a slot."""
    return f"{slot}.control"


def buffer_file(slot: int, index: int) -> str:
    """Return the name of buffer 0 or 1 of a slot."""
    return f"{slot}.{index}.safetensors"


def error_file(slot: int) -> str:
    """Return the name of the error file of a slot's worker."""
    return f"{slot}.error"


def result_file(slot: int) -> str:
    """Return the name of the file for the result of ``launch()``'s function in a slot."""
    return f"{slot}.result"


def refuse(base: str) -> str:
    """Return the reason why ``base`` cannot hold commits; "" if it can."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as error:
        return f"this user cannot create a directory there ({error.strerror})"
    return ""


class CommitDirectory:
    """Commit directory of an agent: new, or taken over from a former agent, and locked until this process ends."""

    def __init__(
        self,
        base: str,
        job_id: str,
        host: str,
        job_directory: str,
        mark: str,
        timeout_s: float,
        keep_s: float,
        pause: Callable[[], bool] = lambda: _pause(),
    ) -> None:
        """Lock the directory; wait for another agent of this job that still holds it.

        That agent has ``timeout_s`` to end. Then it is killed with all its workers, and has ``timeout_s`` once more.
        ``mark``: identifies the workers of this agent. ``keep_s``: time that the directory is kept after the last
        ``keep()`` if all processes of the job die. ``pause()`` waits a moment; if it returns True, give up.

        Raises OSError if the directory cannot be made or locked.
        """
        self.base = Path(base).absolute()
        self._find = partial(_find, self.base, job_id, host)
        self._content = f"{job_id} {Path(job_directory).absolute()}\n{os.getpid()} {mark}".encode()
        self._keep_s = keep_s
        self.path, self.fd = _take_lock(self._find, pause, timeout_s)
        write_file(self.fd, _JOB_FILE, self._content)
        self.keep()

    @property
    def is_lost(self) -> bool:
        """True if the directory was deleted or lost its name: a directory with that name is not this job's."""
        return not is_still(self.path, self.fd)

    def make_anew(self) -> None:
        """Make and lock a new directory in place of a lost one. Raises OSError, and changes nothing then."""
        path, fd = _take_lock(self._find, lambda: True, 0.0)
        write_file(fd, _JOB_FILE, self._content)
        os.close(self.fd)
        self.path, self.fd = path, fd
        self.keep()

    def keep(self) -> None:
        """Keep this directory from counting as stale for the next ``keep_s``, whichever processes of the job die."""
        now = time.time()
        with suppress(OSError):  # removed by hand
            os.utime(_JOB_FILE, (now, now + self._keep_s), dir_fd=self.fd, follow_symlinks=False)

    def open_file(self, name: str, flags: int) -> int:
        """Open a private file of this user; with O_CREAT make it if it does not exist. Raises OSError."""
        return open_file(self.fd, name, flags)

    def slots(self) -> list[int]:
        """Return the slots with control pages, of this agent or of a former one."""
        stems = (name.removesuffix(".control") for name in os.listdir(self.fd) if name.endswith(".control"))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def remove(self) -> None:
        """Remove the directory with all commits of this host, at the end of the job."""
        if not self.is_lost:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Unlock the directory, and leave the commits to the next agent of this host."""
        os.close(self.fd)


def make_agent_directory(base: str) -> str:
    """Make a directory for the socket of an agent without a job directory, locked until this process ends.

    Raises OSError.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=_beginning_of("agent"), dir=base))
        with suppress(FileNotFoundError):  # another process may remove it as stale before it is locked
            fd = open_directory(path)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if is_still(path, fd):
                return str(path)
            os.close(fd)


def remove_agent_directories(base: str) -> None:
    """Remove the socket directories of agents that were killed."""
    remove_job(base, "agent")


def agent_on(base: str, job_id: str, host: str) -> tuple[int, str]:
    """Return the process id (0: it has ended) and the mark ("": there was none) of a host's agent on this machine."""
    path = _find(Path(base).absolute(), job_id, host)
    with _locked(path) as has_ended:
        try:
            fd = open_directory(path)
        except OSError:
            return 0, ""
        pid, mark = _agent_of(fd)
        os.close(fd)
        return 0 if has_ended else pid, mark


def remove_job(base: str, job_id: str) -> None:
    """Remove the commits that killed agents of a finished job have left. Living agents remove their own."""
    for path in _directories(base, _beginning_of(job_id)):
        with _locked(path) as locked:
            if locked:
                shutil.rmtree(path, ignore_errors=True)


def remove_dead(base: str) -> list[str]:
    """Remove the directories of dead jobs of this user from ``base``, and none of living jobs; return their paths."""
    removed = []
    for path in _directories(base, f"{_PREFIX}{os.getuid()}-"):
        with _locked(path) as locked:
            if locked and _remove_job_if_over(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(str(path))
    return removed


def remove_job_directory(path: str, lock: int) -> None:
    """Remove a job's directory unless another process has locked it; ``lock``: descriptor of this process's lock."""
    if _try_lock(lock):
        shutil.rmtree(path, ignore_errors=True)


def _beginning_of(job_id: str) -> str:
    return f"{_PREFIX}{os.getuid()}-{job_id}-"


def _directories(base: str, beginning: str) -> list[Path]:
    """Return the directories of this user whose names begin with ``beginning``."""
    try:
        entries = sorted(Path(base).absolute().iterdir())
    except OSError:
        return []
    return [path for path in entries if path.name.startswith(beginning) and _is_ours(path)]


def _is_ours(path: Path) -> bool:
    """Return True for a directory that only this user can read and write."""
    try:
        return is_private(path.lstat())
    except OSError:
        return False


def _find(base: Path, job_id: str, host: str) -> Path:
    """Return the directory of a host; if there is none, the first free name for a new one.

    Raises FileExistsError if other users have taken all names.
    """
    name = f"{_beginning_of(job_id)}{host}"
    paths = [base / name, *(base / f"{name}~{n}" for n in range(1, _MOST_NAMES))]
    free = None
    for path in paths:
        if _is_ours(path):
            return path
        if free is None and not os.path.lexists(path):
            free = path
    if free is None:
        raise FileExistsError(
            f"{paths[0]}: other users have taken this name and {_MOST_NAMES - 1} similar names. Use another "
            "--commit-dir."
        )
    return free


def _pause() -> bool:
    time.sleep(0.01)
    return False


def _take_lock(find: Callable[[], Path], pause: Callable[[], bool], timeout_s: float) -> tuple[Path, int]:
    """Make or take over the directory that ``find`` names; return its path and the descriptor that locks it."""
    deadline = time.monotonic() + timeout_s
    evicted = False
    while True:
        path = find()
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # removed, or taken by another user
            fd = open_directory(path)
            if _try_lock(fd) and is_still(path, fd):
                if evicted:
                    from elasticstate import processes  # only now: who reads headers needs none of it
                    from elasticstate.options import agent_variable

                    processes.kill_marked(*agent_variable(_agent_of(fd)[1]))
                return path, fd
            if time.monotonic() > deadline and not evicted:
                _kill_holder(fd, _agent_of(fd)[0])
                evicted, deadline = True, time.monotonic() + timeout_s
            os.close(fd)
        if pause() or (evicted and time.monotonic() > deadline):
            raise TimeoutError(f"another agent has locked {path}")


def _agent_of(directory: int) -> tuple[int, str]:
    """Return process id and mark of the agent that has, or had, this directory; 0 and "" if there was none."""
    try:
        pid, _, mark = read_file(directory, _JOB_FILE).decode().splitlines()[1].partition(" ")
        return int(pid), mark
    except (OSError, ValueError, IndexError):
        return 0, ""


def _kill_holder(fd: int, agent: int) -> None:
    """Kill the agent if it has locked this directory (proc_locks(5)) and is not this process."""
    found = os.fstat(fd)
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and inode in fields and int(fields[4]) == agent not in (0, os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(agent, signal.SIGKILL)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a directory for a moment; False: another process has locked it, or it does not exist."""
    try:
        fd = open_directory(path)
    except OSError:
        yield False
        return
    try:
        yield _try_lock(fd) and is_still(path, fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_job_if_over(path: Path) -> bool:
    """Return True if the job that made this commit directory is over; then remove the job's directory, too."""
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
    """Return the id of the job that has this directory; "" if the id is not written yet."""
    try:
        return (directory / ID_FILE).read_text()
    except OSError:
        return ""


# -------------------------------------------------------------------------------------------------------- commit header
# Header of a commit, readable without torch: the places of its tensors, and which of them are shards.
#
# The file is a safetensors file (see state/layout.py). With attached values, ``DCP_SHARDING_INFO`` in its metadata is
# that of torch.distributed.checkpoint (hf_storage.py of torch 2.13), so a directory of commit files is a checkpoint
# that torch's HuggingFaceStorageReader reads.


OBJECTS = "elasticstate.objects"
RANDOM = "elasticstate.random"
METADATA = "__metadata__"
VERSION = 1


class Shard(msgspec.Struct, array_like=True, frozen=True):
    """Place of an entry in a tensor that the workers of a world hold together."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]


class Sharding(msgspec.Struct, array_like=True, frozen=True):
    """Attached values of a commit: their names, and the places of all their tensors. Replicated ones have offset 0."""

    names: tuple[str, ...] = ()
    shards: dict[str, Shard] = {}


NO_SHARDING = Sharding()


class Stored(msgspec.Struct, frozen=True):
    """A tensor as the format describes it. Offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties that the format cannot describe."""

    version: int
    kinds: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape) where the stored ones differ
    tied: dict[str, str]  # name -> the name under which the bytes are stored
    order: list[str] | None  # all names in capture order; None: capture order is the stored order
    sharding: Sharding = NO_SHARDING
    strides: dict[str, tuple[int, ...]] = {}  # name -> those of a tensor that was captured in another order than C's


class Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    format: str  # "pt": the value that other readers of such files expect
    elasticstate: str  # Notes as JSON, because the format's metadata contains only strings
    DCP_SHARDING_INFO: str = ""  # sharding_info() as JSON


class SavedOffsets(msgspec.Struct, frozen=True):
    """Place of a shard in its tensor, as torch reads it."""

    saved_offsets: tuple[int, ...]


def sharding_info(stored: Mapping[str, Stored], names: Iterable[str], sharding: Sharding) -> str:
    """Return what torch's HuggingFaceStorageReader reads. It requires all names of the file, in ``names``.

    ``stored``: the tensors, some of which have more dimensions than their shards (complex numbers as pairs).
    """
    found = dict.fromkeys(names, SavedOffsets((0,)))
    for name, item in stored.items():
        shard = sharding.shards.get(name)
        offsets = shard.offsets if shard is not None else ()
        found[name] = SavedOffsets((*offsets, *[0] * (len(item.shape) - len(offsets))))
    return msgspec.json.encode(found).decode()


def decode(header: bytes | memoryview) -> tuple[Metadata, Notes, dict[str, Stored]]:
    """Return the metadata, the notes in it, and the stored tensors of a header. Raises ValueError if it is damaged."""
    try:
        raw = msgspec.json.decode(header[8:], type=dict[str, msgspec.Raw])
        if METADATA not in raw:
            raise ValueError("the header has no metadata")
        metadata = msgspec.json.decode(raw.pop(METADATA), type=Metadata)
        notes = msgspec.json.decode(metadata.elasticstate, type=Notes)
        stored = {name: msgspec.json.decode(item, type=Stored) for name, item in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if notes.version != VERSION:
        raise ValueError(f"the format version is {notes.version}, not {VERSION}")
    return metadata, notes, stored


class Parts(msgspec.Struct, frozen=True):
    """Offsets of the parts of a commit file, in bytes."""

    random: int  # end of the header
    tensors: int
    objects: int
    size_bytes: int  # of the whole file, as its header states; a seal covers all bytes in use


class _DataOffsets(msgspec.Struct):
    data_offsets: tuple[int, int]


def parts_of(header: bytes) -> Parts:
    """Return the places of the parts that a header describes, without a look at its tensors. Raises ValueError."""
    begin = len(header)
    try:
        items = msgspec.json.decode(memoryview(header)[8:], type=dict[str, msgspec.Raw])
        random = msgspec.json.decode(items[RANDOM], type=_DataOffsets).data_offsets
        objects = msgspec.json.decode(items[OBJECTS], type=_DataOffsets).data_offsets
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the header of a commit is malformed ({error})") from error
    if not 0 == random[0] <= random[1] <= objects[0] <= objects[1]:
        raise ValueError("the header of a commit has its parts in a wrong order")
    return Parts(begin, begin + random[1], begin + objects[0], begin + objects[1])


def header_digest(header: Any) -> int:
    """Return the 64-bit hash that identifies a header in a seal."""
    return int.from_bytes(hashlib.blake2b(header, digest_size=8).digest(), "little")


# ----------------------------------------------------------------------------------------------------------- allocation
# Allocation of files in memory: a file gets its full length, with all its blocks, before a process writes to it.
#
# So a full file system causes an error, and never a SIGBUS in a process that has mapped the file.


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


# ---------------------------------------------------------------------------------------------------------------- seals
# Seals: keyed checksums of data that a job writes to files and reads again. A job unpickles only sealed data.
#
# The key is derived from the job's token (net/trust.py). Only the memory of the job's processes contains it.


TAG_BYTES = 16
RESULT_HEAD_BYTES = TAG_BYTES

_COMMIT = struct.Struct("<16sIQQQI16s16s")


def part_tag(key: bytes, *parts: Any) -> bytes:
    """Return the tag of buffers of bytes, in this order."""
    hasher = hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=b"part")
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def commit_tag(
    key: bytes,
    owner: bytes,
    index: int,
    commit: tuple[int, int],
    length: int,
    checksum: int,
    header: bytes,
    rest: bytes,
) -> bytes:
    """Return the tag of a seal: owner, buffer index, commit, length, CRC-32C of all bytes, tags of the unpickled parts.

    ``header`` is the tag of the header, ``rest`` the tag of random state and objects.
    """
    fields = _COMMIT.pack(owner, index, *commit, length, checksum, header, rest)
    return hashlib.blake2b(fields, digest_size=TAG_BYTES, key=key, person=b"commit").digest()


def result_hasher(key: bytes) -> Any:
    """Return the hasher for the result of a worker of ``launch()``."""
    return hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=b"result")
