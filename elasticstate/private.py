"""Private directories and files of this user, opened so that no other user can replace them.

In a directory that others may write to (``/dev/shm``, ``/tmp``), a name proves nothing: the file may have been deleted,
and another user may have taken the name. So ``open_directory`` verifies a directory, and files are opened relative to
its descriptor. Symbolic links are never followed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a planted FIFO must not block
_OTHERS = 0o077


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


def make_file(directory: int, name: str) -> int:
    """Make a file in place of any file with that name; return a descriptor to read and write it. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    fd = open_file(directory, name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.fchmod(fd, 0o600)  # the umask may have taken the owner's access away
    return fd


def write_file(directory: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """Replace the content of a file atomically: a reader gets the old or the new content. Raises OSError."""
    fresh = f"{name}.new"
    try:
        with open(make_file(directory, fresh), "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        os.replace(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh, dir_fd=directory)
        raise


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
