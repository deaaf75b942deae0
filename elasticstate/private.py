"""Directories and files of this user, opened so that no other user can replace them.

In a directory that others may write to (``/dev/shm``, ``/tmp``), a name proves nothing: the file may have been deleted,
and another user may have taken the name. So ``open_directory`` verifies a private directory, and files are opened
relative to its descriptor. ``open_own`` opens what others may read, but only this user may have written. Symbolic links
are never followed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a planted FIFO must not block
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_looks: dict[int, tuple[int, int]] = {}  # by file system: see _look_of_own_files


class PlantedFileError(PermissionError):
    """Another user may have written a file or directory. The message says why, and what to do."""


def open_directory(path: str | Path, parent: int | None = None) -> int:
    """Open a directory that belongs to this user and that no other user may read or write.

    ``parent``: descriptor of the directory that a relative path starts from; None: the current directory.

    Raises OSError; PermissionError if the directory belongs to another user or others may use it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    if not is_private(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(f"{path} is not a private directory of this user (owner {os.getuid()}, mode 0700)")
    return fd


def open_file(directory: int, name: str, flags: int) -> int:
    """Open a file in the directory with the descriptor ``directory``; with O_CREAT make it if it does not exist.

    Raises OSError; PermissionError for a file that another user can read or write, or may have put there.
    """
    fd = os.open(name, flags | _SAFE, 0o600, dir_fd=directory)
    found = os.fstat(fd)
    is_ours = found.st_uid == os.getuid() and not found.st_mode & _OTHERS
    if not (stat.S_ISREG(found.st_mode) and is_ours and found.st_nlink <= 1):
        os.close(fd)
        raise PermissionError(
            f"{name} is not a private regular file of this user with one link (owner {found.st_uid}, "
            f"mode {found.st_mode:o}, {found.st_nlink} links)"
        )
    return fd


def make_file(directory: int, name: str, mode: int = 0o600) -> int:
    """Make a file in place of any file with that name; return a descriptor to read and write it. Raises OSError.

    The umask may take the access of others away that ``mode`` gives, but not the owner's.
    """
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, mode, dir_fd=directory)
    given = stat.S_IMODE(os.fstat(fd).st_mode)
    if given & 0o600 != 0o600:
        os.fchmod(fd, given | 0o600)
    return fd


def open_own(path: str, flags: int, parent: int | None = None, owners: Collection[int] | None = ()) -> int:
    """Open a directory, or a file, that nobody but this user, root and ``owners`` (None: any user) can have written.

    ``parent``: as for ``open_directory``. Raises OSError; PlantedFileError with the remedy.
    """
    check_own(os.stat(path, dir_fd=parent, follow_symlinks=False), path, parent, owners)  # before an open that may fail
    fd = os.open(path, flags | _SAFE, dir_fd=parent)
    try:
        check_own(os.fstat(fd), path, parent, owners)  # another file may have got the name
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_own(found: os.stat_result, path: str, parent: int | None = None, owners: Collection[int] | None = ()) -> None:
    """Raise PlantedFileError if ``open_own`` would."""
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link, and links are not followed" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise PlantedFileError(f"{path} is {kind}. Put the file or directory itself in its place")
    if owners is None:
        return
    mine = os.geteuid()
    writable = found.st_mode & _OTHERS_WRITE
    if found.st_uid in (mine, 0, *owners) and not writable:
        return
    owner, mode = _look_of_own_files(found.st_dev, os.path.dirname(path) or ".", parent)
    if found.st_uid not in (mine, 0, owner, *owners):
        raise PlantedFileError(
            f"{path} belongs to user {found.st_uid}, not to this user ({mine}). If you trust its content, run "
            f"chown -R {mine}, or make a copy of it (cp -r)"
        )
    if writable & ~mode:
        raise PlantedFileError(
            f"other users can change {path} (mode {stat.S_IMODE(found.st_mode):04o}). If you trust its content, run "
            "chmod -R go-w"
        )


def _look_of_own_files(device: int, directory: str, parent: int | None) -> tuple[int, int]:
    """Return owner and mode that the file system ``device`` gives to a private file of this user in this directory.

    Some give all files the same owner or mode: NFS that maps users to one, CIFS, vfat, many of FUSE.
    """
    if device not in _looks:
        try:
            fd, name = tempfile.mkstemp(
                prefix=".elasticstate-", dir=directory if parent is None else f"/proc/self/fd/{parent}"
            )
        except OSError:
            return os.geteuid(), 0
        with open(fd, "rb"):
            os.unlink(name)
            found = os.fstat(fd)
        _looks[device] = found.st_uid, found.st_mode
    return _looks[device]


@contextmanager
def replacing(directory: int, name: str, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Write a file that replaces ``name`` when it is complete. An error leaves the old one. Raises OSError."""
    fresh = f"{name}.new"
    try:
        with open(make_file(directory, fresh, mode), "wb") as file:
            yield file
        os.replace(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh, dir_fd=directory)
        raise


def write_file(directory: int, name: str, data: bytes, mode: int = 0o600, is_lasting: bool = False) -> None:
    """Replace the content of a file atomically: a reader gets the old or the new content. Raises OSError.

    ``is_lasting``: the new content is on the disk when this returns.
    """
    with replacing(directory, name) as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
        if is_lasting:
            file.flush()
            os.fsync(file.fileno())
    if is_lasting:
        os.fsync(directory)


def read_file(directory: int, name: str) -> bytes:
    """Return the content of a file. Raises OSError."""
    with open(open_file(directory, name, os.O_RDONLY), "rb") as file:
        return file.read()


def is_private(found: os.stat_result) -> bool:
    """Return True for a directory of this user that no other user may read or write."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHERS


def is_still(path: str | Path, fd: int) -> bool:
    """Return True if ``path`` still is the directory with the descriptor ``fd``, not deleted and not replaced."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False
