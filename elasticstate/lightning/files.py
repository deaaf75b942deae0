"""Checkpoint files of an attempt that is given up: removed, as the callbacks that wrote them forget them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_NAME = re.compile(r"\.(?P<name>.+)\.elasticstate-(?P<job>[0-9a-f]+)-(?P<kind>new|old)-(?P<number>\d+)")


class _Change(NamedTuple):
    """A file that was written or removed, and the hidden file that says so."""

    number: int
    is_new: bool  # False: the hidden file is the removed one
    hidden: Path


class CheckpointFiles:
    """Changes to checkpoint files since a commit, undone if the job goes back to this commit.

    The state of a ModelCheckpoint names its files, and is in the commits. After a failure the callback would not know a
    file that it has written since, and would miss one that it has removed. So a hidden marker is beside each new file,
    and a removed file is only renamed, until the job cannot go back before the change. Their names have a number that
    counts the changes of the job: commits contain the count. All ranks count, rank 0 writes.

    Files behind a URL, and those that are overwritten, are left as they are.

    Args:
        job: id of the job. None: no other process can continue this one, so nothing is kept.
    """

    def __init__(self, job: str | None) -> None:
        self._job = None if job is None else hashlib.blake2b(job.encode(), digest_size=8).hexdigest()
        self.count = 0
        self._directories: set[str] = set()
        self._pending: list[_Change] = []

    def state_dict(self) -> dict[str, Any]:
        return {"job": self._job, "count": self.count, "directories": sorted(self._directories)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._job, self.count, self._directories = state["job"], state["count"], set(state["directories"])

    def write(self, filepath: object, is_writer: bool) -> None:
        """Count a file that is about to be written. ``is_writer``: this rank writes it."""
        path = self._counted(filepath)
        if path is not None and is_writer and not os.path.lexists(path):
            change = self._change(path, is_new=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            change.hidden.touch()

    def remove(self, filepath: object, is_writer: bool) -> bool:
        """Count a file that is about to be removed, and hide it. Return False if it must be removed otherwise."""
        path = self._counted(filepath)
        if path is None or (is_writer and not os.path.lexists(path)):
            return False
        if is_writer:
            path.rename(self._change(path, is_new=False).hidden)
        return True

    def settle(self, count: int) -> None:
        """Make the first ``count`` changes final: the job cannot go back before them."""
        for change in [change for change in self._pending if change.number <= count]:
            self._pending.remove(change)
            _delete(change.hidden)

    def undo(self, directories: Iterable[str], known: Container[str]) -> None:
        """Undo the changes after the commit whose count was loaded. Rank 0 calls it, before it writes a file.

        ``directories``: those of the callbacks. ``known``: paths that are in the commit.
        """
        changes: dict[Path, list[_Change]] = defaultdict(list)
        for directory in {*self._directories, *map(str, directories)}:
            with suppress(OSError):  # it does not exist yet, or is a URL
                for entry in list(os.scandir(directory)):
                    found = _NAME.fullmatch(entry.name)
                    if found is not None and found["job"] == self._job:
                        change = _Change(int(found["number"]), found["kind"] == "new", Path(entry.path))
                        changes[Path(directory, found["name"])].append(change)
        for path, of_path in changes.items():
            undone = sorted(change for change in of_path if change.number > self.count)
            if undone and not undone[0].is_new:
                _delete(path)
                undone[0].hidden.rename(path)
            elif undone and str(path) not in known:
                _delete(path)
            for change in of_path:
                _delete(change.hidden)
        self._pending = []

    def _counted(self, filepath: object) -> Path | None:
        """Return the path of a local file, once its change was counted; None if it is not handled here."""
        text = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
        if self._job is None or not isinstance(text, str) or not text or "://" in text or "::" in text:
            return None
        self.count += 1
        self._directories.add(os.path.dirname(os.path.abspath(text)))
        return Path(os.path.abspath(text))

    def _change(self, path: Path, is_new: bool) -> _Change:
        kind = "new" if is_new else "old"
        hidden = path.with_name(f".{path.name}.elasticstate-{self._job}-{kind}-{self.count}")
        self._pending.append(_Change(self.count, is_new, hidden))
        return self._pending[-1]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
