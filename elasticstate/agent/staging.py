"""Staging: a consistent copy of a slot's newest commit, made while its worker trains on.

A worker overwrites the older of its two buffers with each commit. So a copy is whole if the buffer has the same seal
before and after it, and the checksum of the copy is that of the seal.
"""

from __future__ import annotations

import hmac
import mmap
import os
from dataclasses import dataclass

from elasticstate._native import ControlPage
from elasticstate.allocation import grow
from elasticstate.core.types import CommitId
from elasticstate.durable.copies import crc32c
from elasticstate.durable.parts import cut
from elasticstate.private import make_file
from elasticstate.seals import commit_tag, part_tag

_FILE = "durable.part"
_ATTEMPTS = 8


class TornError(Exception):
    """Each attempt to copy a commit was overtaken by the worker."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged commit: a file without a name."""

    commit: CommitId
    fd: int
    size_bytes: int


def stage(page: ControlPage, buffers: tuple[int, int], owner: bytes, key: bytes, directory: int) -> Staged | None:
    """Copy the newest commit of a slot into a new file. Return None if the slot holds no commit.

    ``buffers`` and ``directory``: descriptors of the slot's buffers, and of the directory for the file.

    Raises OSError if the file cannot be made as large, TornError, or ValueError for a damaged commit.
    """
    fd = make_file(directory, _FILE)
    try:
        os.unlink(_FILE, dir_fd=directory)
        for _ in range(_ATTEMPTS):
            seals = {index: seal for index in (0, 1) if (seal := page.sealed(index, owner)) is not None}
            if not seals:
                os.close(fd)
                return None
            index = max(seals, key=lambda index: seals[index][:2])
            seal = seals[index]
            generation, tick, _, length, expected, tag = seal
            grow(fd, length)
            _copy(buffers[index], fd, length)
            if page.sealed(index, owner) == seal:
                commit = CommitId(generation, tick)
                _verify(fd, length, expected, tag, (key, owner, index, commit))
                return Staged(commit, fd, length)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise TornError(
        f"the worker has overwritten the commit during each of {_ATTEMPTS} copies. Commit less often: "
        "state.commit(every=N)"
    )


def _copy(source: int, target: int, length: int) -> None:
    at = 0
    os.lseek(target, 0, os.SEEK_SET)
    while at < length:
        copied = os.sendfile(target, source, at, length - at)
        if not copied:
            raise ValueError(f"the buffer ends before {length} bytes")
        at += copied


def _verify(fd: int, length: int, expected: int, tag: bytes, sealed_as: tuple[bytes, bytes, int, CommitId]) -> None:
    """Raise ValueError unless the bytes are those that a worker of this job has sealed."""
    key, owner, index, commit = sealed_as
    with mmap.mmap(fd, length) as mapped, memoryview(mapped) as content:
        if crc32c(content) != expected:
            raise ValueError(f"commit {commit} is damaged: its checksum is wrong")
        found = cut(content)
        header = part_tag(key, content[: found.random])
        rest = part_tag(key, content[found.random : found.tensors], content[found.objects :])
        if not hmac.compare_digest(tag, commit_tag(key, owner, index, commit, length, expected, header, rest)):
            raise ValueError(f"commit {commit} was not written by a worker of this job")
