"""Storage of durable copies: one level of folders with files, in a directory or at a URL of fsspec."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from elasticstate.private import check_own, make_file, open_own

Chunk = memoryview | bytes
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITTEN = re.compile(r"part-\d+\.[a-z]+|manifest\.json(\.new)?")  # all names of files in copies


ReadAt = Callable[[int, int], bytes]
"""Returns bytes of an open file at (offset, size), fewer at the end of the file."""


def is_url(place: str) -> bool:
    """Return True for a URL of fsspec. A path, also as ``file://``, needs no library."""
    return "://" in place and not place.startswith("file://")


def absolute(place: str) -> str:
    """Return the place of a storage independently of the working directory."""
    return place if is_url(place) else os.path.abspath(place.removeprefix("file://"))


def refuse(place: str) -> str:
    """Return the reason why this machine cannot use a storage, or ""."""
    if not is_url(place):
        return ""
    if find_spec("fsspec") is None:
        return "URLs require fsspec. Run pip install 'elasticstate[durable]'"
    import fsspec  # type: ignore[import-untyped]
    from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]

    protocol = place.partition("://")[0].partition("::")[0]
    if protocol in registry or protocol in fsspec.available_protocols():
        known: dict[str, Any] = known_implementations.get(protocol, {})
        module = str(known.get("class", "")).partition(".")[0]
        if not module or find_spec(module) is not None:
            return ""
        return f"fsspec requires another package for {protocol}://: {known.get('err', module)}"
    return f"fsspec knows no protocol {protocol!r}. Name a path, or a URL like s3://bucket/folder"


def open_storage(place: str, owners: Collection[int] | None = ()) -> DurableStorage:
    """Return the storage at a path or URL. ``owners``: see ``Files``; a URL has none."""
    return UrlStorage(place) if is_url(place) else Directory(os.path.realpath(absolute(place)), Files(owners))


class Files:
    """Operations on files and directories, in directories that other users may write to. A test replaces them by a disk
    that loses power.

    Links are not followed. Only this user, root and ``owners`` (None: any user) may have written what is read or
    changed, else the methods raise PlantedFileError. Whatever the umask, other users cannot write to what is made.
    """

    def __init__(self, owners: Collection[int] | None = ()) -> None:
        self._owners = owners

    def make_directory(self, path: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(path, 0o755)

    def names(self, path: str) -> list[str]:
        with descriptor(os.open(path, _DIRECTORY)) as fd:
            return os.listdir(fd)

    def is_directory(self, path: str) -> bool:
        """Return True for a directory, or a link, which may be planted: reading it says so."""
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return False
        return stat.S_ISDIR(mode) or stat.S_ISLNK(mode)

    def sizes(self, path: str) -> dict[str, int]:
        """Return names and sizes of the files in a directory."""
        sizes = {}
        with descriptor(open_own(path, _DIRECTORY, owners=self._owners)) as fd:
            for name in os.listdir(fd):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                check_own(found, f"{path}/{name}", owners=self._owners)
                sizes[name] = found.st_size
        return sizes

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        with (
            self._directory_of(path) as (directory, name),
            open(open_own(name, os.O_RDONLY, directory, self._owners), "rb") as file,
        ):
            file.seek(offset)
            return file.read(size)

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Write a file and wait until its bytes are on the disk."""
        with self._directory_of(path) as (directory, name), open(make_file(directory, name, 0o644), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        """Rename a file within its directory."""
        with self._directory_of(old) as (directory, name):
            os.replace(name, os.path.basename(new), src_dir_fd=directory, dst_dir_fd=directory)

    def remove(self, path: str) -> None:
        with self._directory_of(path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def sync(self, path: str) -> None:
        """Wait until the names in a directory are on the disk."""
        with descriptor(os.open(path, _DIRECTORY)) as fd:
            os.fsync(fd)

    @contextmanager
    def _directory_of(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the directory of a file. The value is its descriptor, and the name of the file."""
        directory, name = os.path.split(path)
        with descriptor(open_own(directory, _DIRECTORY, owners=self._owners)) as fd:
            yield fd, name


@contextmanager
def descriptor(fd: int) -> Iterator[int]:
    """Close the descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


class Directory:
    """Storage in a directory: a local disk, or a file system that hosts share.

    Every method of a storage may block, and raises OSError or an error of the library behind the URL.
    """

    def __init__(self, path: str, files: Files) -> None:
        self._path = path
        self._files = files

    def folders(self) -> list[str]:
        """Return the names of all folders; none if the storage does not exist yet."""
        try:
            names = self._files.names(self._path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if self._files.is_directory(f"{self._path}/{name}"))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return names and sizes of the files in a folder."""
        return self._files.sizes(f"{self._path}/{folder}")

    @contextmanager
    def open(self, folder: str, name: str) -> Iterator[ReadAt]:
        yield functools.partial(self._files.read_at, f"{self._path}/{folder}/{name}")

    def write(self, folder: str, name: str, chunks: Iterable[Chunk]) -> None:
        """Write a file, which is durable after the return. Create the folder if it does not exist."""
        self._make(folder)
        self._files.write(f"{self._path}/{folder}/{name}", chunks)

    def publish(self, folder: str, name: str, data: bytes) -> None:
        """Write a file so that readers find all of it or nothing, after all earlier files of the folder."""
        path = f"{self._path}/{folder}"
        self._make(folder)
        self._files.write(f"{path}/{name}.new", [data])
        self._files.sync(path)  # the other files must not get their names later than this one
        self._files.rename(f"{path}/{name}.new", f"{path}/{name}")
        self._files.sync(path)

    def _make(self, folder: str) -> None:
        """Make the directory of a copy, and all above it, so that a loss of power does not undo it."""
        path = f"{self._path}/{folder}"
        missing = []
        while not self._files.is_directory(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            self._files.make_directory(path)
            self._files.sync(os.path.dirname(path))

    def remove(self, folder: str, first: str) -> None:
        """Remove a copy: the file ``first`` before all others, because it makes the folder valid."""
        path = f"{self._path}/{folder}"
        with suppress(FileNotFoundError):
            self._files.remove(f"{path}/{first}")
            self._files.sync(path)
        for name in filter(_WRITTEN.fullmatch, self._files.names(path)):  # another user may have renamed the directory
            self._files.remove(f"{path}/{name}")
        self._files.remove_directory(path)


_BLOCK_BYTES = 16 << 20  # of one request; S3 allows 10,000 parts of a file


class UrlStorage:
    """Storage behind a URL that fsspec knows, with Directory's methods. One PUT of an object store is atomic."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._system: Any
        self._system, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")

    def folders(self) -> list[str]:
        return sorted(_name(entry) for entry in self._entries(self._root) if entry["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        return {
            _name(entry): int(entry["size"])
            for entry in self._entries(f"{self._root}/{folder}")
            if entry["type"] == "file"
        }

    def _entries(self, path: str) -> list[dict[str, Any]]:
        self._system.invalidate_cache()
        try:
            found: list[dict[str, Any]] = self._system.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [entry for entry in found if entry["name"].rstrip("/") != path]

    @contextmanager
    def open(self, folder: str, name: str) -> Iterator[ReadAt]:
        with self._system.open(f"{self._root}/{folder}/{name}", "rb", block_size=_BLOCK_BYTES) as file:

            def read_at(offset: int, size: int) -> bytes:
                file.seek(offset)
                data: bytes = file.read(size)
                return data

            yield read_at

    def write(self, folder: str, name: str, chunks: Iterable[Chunk]) -> None:
        path = f"{self._root}/{folder}/{name}"
        try:
            file = self._system.open(path, "wb", block_size=_BLOCK_BYTES)
        except FileNotFoundError:  # file systems with directories; an object store has none
            self._system.makedirs(f"{self._root}/{folder}", exist_ok=True)
            file = self._system.open(path, "wb", block_size=_BLOCK_BYTES)
        with file:
            for chunk in chunks:
                file.write(chunk)

    def publish(self, folder: str, name: str, data: bytes) -> None:
        self._system.pipe_file(f"{self._root}/{folder}/{name}", data)

    def remove(self, folder: str, first: str) -> None:
        path = f"{self._root}/{folder}"
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{path}/{first}")
        self._system.rm(path, recursive=True)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


DurableStorage = Directory | UrlStorage
