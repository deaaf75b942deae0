"""A disk that loses power: what was not synced may be there, in part, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from elasticstate.durable.durable_storage import Chunk, Files


class PowerLoss(BaseException):
    """The power has failed before this operation."""


class _Content:
    """Content of a file. ``synced``: the length that is on the disk for sure."""

    def __init__(self) -> None:
        self.data = b""
        self.synced = 0


class Disk(Files):
    """Files in memory. ``fails_after``: operations until the power fails; None: it does not fail.

    After ``lose_power``, each directory has a part of its unsynced changes, in their order. An unsynced file has a part
    of its bytes.
    """

    def __init__(self) -> None:
        self.fails_after: int | None = None
        self.operations = 0
        self._now: dict[str, _Content | None] = {"/": None}  # path -> content; None: a directory
        self._synced = dict(self._now)
        self._pending: dict[str, list[Callable[[dict[str, _Content | None]], None]]] = {}

    def _operate(self) -> None:
        if self.fails_after is not None and self.operations >= self.fails_after:
            raise PowerLoss
        self.operations += 1

    def _change(self, path: str, change: Callable[[dict[str, _Content | None]], None]) -> None:
        change(self._now)
        self._pending.setdefault(path.rpartition("/")[0] or "/", []).append(change)

    def lose_power(self, part_of: Callable[[int], int]) -> None:
        """``part_of(n)`` returns how many of n changes, or bytes, are on the disk."""
        for changes in self._pending.values():
            for change in changes[: part_of(len(changes))]:
                change(self._synced)
        self._now = {}
        for path, content in sorted(self._synced.items()):
            parent = path.rpartition("/")[0] or "/"
            if path == "/" or self._now.get(parent, path) is None:  # its directory is on the disk, too
                self._now[path] = content
        for content in self._now.values():
            if content is not None:
                content.data = content.data[: content.synced + part_of(len(content.data) - content.synced)]
                content.synced = len(content.data)
        self._synced, self._pending = dict(self._now), {}
        self.fails_after, self.operations = None, 0

    # ------------------------------------------------------------------------------------------- operations

    def make_directory(self, path: str) -> None:
        self._operate()
        if path not in self._now:
            self._change(path, lambda names: names.update({path: None}))

    def names(self, path: str) -> list[str]:
        if path not in self._now:
            raise FileNotFoundError(path)
        return [name[len(path) + 1 :] for name in self._now if name.rpartition("/")[0] == path]

    def is_directory(self, path: str) -> bool:
        return self._now.get(path, b"") is None

    def sizes(self, path: str) -> dict[str, int]:
        return {name: len(self._content(f"{path}/{name}").data) for name in self.names(path)}

    def _content(self, path: str) -> _Content:
        content = self._now.get(path)
        if content is None:
            raise FileNotFoundError(path)
        return content

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        return self._content(path).data[offset : offset + size]

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        self._operate()
        content = _Content()
        self._change(path, lambda names: names.update({path: content}))
        for chunk in chunks:
            self._operate()
            content.data += bytes(chunk)
        self._operate()
        content.synced = len(content.data)

    def rename(self, old: str, new: str) -> None:
        self._operate()

        def change(names: dict[str, _Content | None]) -> None:
            if old in names:
                names[new] = names.pop(old)

        self._change(new, change)

    def remove(self, path: str) -> None:
        self._operate()
        self._content(path)
        self._change(path, lambda names: names.pop(path, None) and None)

    def remove_directory(self, path: str) -> None:
        self._operate()
        assert not self.names(path), "rmdir of a directory that is not empty"

        def change(names: dict[str, _Content | None]) -> None:
            for name in [name for name in names if name == path or name.startswith(f"{path}/")]:
                del names[name]

        self._change(path, change)

    def sync(self, path: str) -> None:
        self._operate()
        for change in self._pending.pop(path, []):
            change(self._synced)

    def files(self) -> Iterator[str]:
        yield from (path for path, content in self._now.items() if content is not None)

    def damage(self, path: str, at: int) -> None:
        """Change one byte of a file."""
        content = self._content(path)
        if content.data:
            at %= len(content.data)
            content.data = content.data[:at] + bytes([content.data[at] ^ 1]) + content.data[at + 1 :]

    def lose(self, path: str) -> None:
        """Lose a file, as a storage does that forgets."""
        del self._now[path]
        self._synced.pop(path, None)
