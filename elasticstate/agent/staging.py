"""Staging: consistent copies of slots' commits, made while their workers train on.

A worker overwrites the older of its two buffers with each commit. So a copy is whole if the buffer has the same
seal before and after it, and the checksum of the copy is that of the seal.

The workers of a sharded job hold different parts of one commit. An order for it names the *first commit from* an id
on, which all workers seal at the same tick. If they commit often, this id is still to come, and the copies begin at
the seals.
"""

from __future__ import annotations

import hmac
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from elasticstate._native import ControlPage
from elasticstate.commits import commit_tag, grow, part_tag
from elasticstate.core.ids import CommitId
from elasticstate.durable.parts import cut
from elasticstate.durable.stored_copies import crc32c
from elasticstate.net.messages import Place
from elasticstate.private import make_file
from elasticstate.replicas.store import Source

_FILE = "durable.part"
_ATTEMPTS = 8
_PIECE_BYTES = 64 << 20
_LOOK_INTERVAL_S = 0.002
_COMING_S = 15.0

_Seal = tuple[int, int, int, int, int, bytes]
_Place = tuple[int, int]  # offset and size in bytes


class TornError(Exception):
    """The worker has overwritten the commit before it was copied."""


class NoCommitError(Exception):
    """A slot has no such commit, and will not have it soon."""


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """A slot whose commit is staged.

    ``page`` and ``buffers`` (descriptors) are None if the slot is not on this host, which keeps a copy of its commit.
    """

    name: str
    owner: bytes
    page: ControlPage | None
    buffers: tuple[int, int] | None
    kept: Callable[[CommitId], Source | None] = lambda commit: None


@dataclass(frozen=True, slots=True)
class Staged:
    """Staged commits: a file without a name, and the places of the commits in it, in the order of their slots."""

    commit: CommitId
    fd: int
    places: tuple[_Place, ...]


def stage(
    slots: Sequence[StagingSlot],
    key: bytes,
    directory: int,
    first: CommitId | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> Staged:
    """Copy one commit of these slots into a new file: the first one from ``first`` on; None: the newest of one slot.

    ``directory``: descriptor of the directory for the file. ``go_on``: returns False when the copies are not wanted any
    more.

    Raises OSError if the file cannot be made as large, TornError, NoCommitError, or ValueError for a damaged commit.
    """
    assert first is not None or len(slots) == 1, "slots may have different newest commits"
    fd = make_file(directory, _FILE)
    try:
        os.unlink(_FILE, dir_fd=directory)
        staging = _Staging(fd, key, first, go_on)
        with ThreadPoolExecutor(len(slots), thread_name_prefix="elasticstate-staging") as threads:
            found = list(threads.map(staging.stage, slots))
        commits = {commit for commit, _ in found}
        if len(commits) > 1:
            raise TornError(f"the workers of this host have made different commits: {sorted(commits)}")
        return Staged(found[0][0], fd, tuple(place for _, place in found))
    except BaseException:
        os.close(fd)
        raise


class _Staging:
    """Staging of several slots at once, each on a thread of its own, into one file."""

    def __init__(self, fd: int, key: bytes, first: CommitId | None, go_on: Callable[[], bool]) -> None:
        self._fd, self._key, self._first, self._go_on = fd, key, first, go_on
        self._growing = threading.Lock()
        self._end = 0
        self._failure: BaseException | None = None

    def stage(self, slot: StagingSlot) -> tuple[CommitId, _Place]:
        """Stage a slot. Return its commit, and the place in the file."""
        try:
            return self._stage(slot)
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            raise self._failure from None

    def _stage(self, slot: StagingSlot) -> tuple[CommitId, _Place]:
        kept = slot.kept(self._first) if self._first is not None else None
        if kept is not None:
            with closing(kept):
                return self._stage_kept(slot, kept)
        place = self._prepared(slot)
        for _ in range(1 if self._first is not None else _ATTEMPTS):
            index, seal = self._find(slot)
            generation, tick, _, length, checksum, tag = seal
            place = self._reserve(length, place)
            assert slot.buffers is not None
            assert slot.page is not None
            _copy(slot.buffers[index], self._fd, *place)
            if slot.page.sealed(index, slot.owner) == seal:
                commit = CommitId(generation, tick)
                self._verify(place, checksum, tag, (slot.owner, index, commit))
                return commit, place
        often = "once" if self._first is not None else f"during each of {_ATTEMPTS} copies"
        raise TornError(
            f"the worker of {slot.name} has overwritten the commit {often}. Commit less often: state.commit(every=N)"
        )

    def _stage_kept(self, slot: StagingSlot, kept: Source) -> tuple[CommitId, _Place]:
        sealed = kept.sealed
        place = self._reserve(sealed.length, (-1, 0))
        for at in range(0, sealed.length, _PIECE_BYTES):
            piece = memoryview(kept.memory)[at : min(at + _PIECE_BYTES, sealed.length)]
            _write(self._fd, piece, place[0] + at)
        self._verify(place, sealed.checksum, sealed.tag, (slot.owner, sealed.index, sealed.commit))
        return sealed.commit, place

    # --------------------------------------------------------------------------------------------- choice of a commit

    def _find(self, slot: StagingSlot) -> tuple[int, _Seal]:
        """Return the buffer that has the commit, and its seal. Wait for a commit that is still to come."""
        if slot.page is None:
            raise NoCommitError(f"this host keeps no copy of commit {self._first} of {slot.name}")
        until = time.monotonic() + _COMING_S
        while True:
            seals = {index: seal for index in (0, 1) if (seal := slot.page.sealed(index, slot.owner)) is not None}
            in_order = sorted(seals, key=lambda index: seals[index][:2])
            if self._first is None:
                if not in_order:
                    raise NoCommitError(f"{slot.name} holds no commit")
                return in_order[-1], seals[in_order[-1]]
            later = [index for index in in_order if seals[index][:2] >= self._first]
            if later and (len(later) < len(in_order) or seals[later[0]][:2] == self._first):
                return later[0], seals[later[0]]
            if len(later) == 2:
                raise TornError(f"the worker of {slot.name} has made newer commits than {self._first} in both buffers")
            if not self._comes(slot.page, self._first.generation) or time.monotonic() > until:
                raise NoCommitError(f"{slot.name} does not make commit {self._first}")
            time.sleep(_LOOK_INTERVAL_S)

    def _comes(self, page: ControlPage, generation: int) -> bool:
        """Return True if the worker may make further commits in this generation."""
        _, _, place, entered, _ = page.stamp()
        return self._go_on() and self._failure is None and (place, entered) == (Place.TRAIN, generation)

    # -------------------------------------------------------------------------------------------------------- the file

    def _prepared(self, slot: StagingSlot) -> _Place:
        """Reserve a place of the size of the newest commit now, because new pages cost more than the copy itself."""
        seals = [seal for index in (0, 1) if slot.page is not None and (seal := slot.page.sealed(index, slot.owner))]
        return self._reserve(max(seals)[3], (-1, 0)) if seals else (-1, 0)

    def _reserve(self, length: int, place: _Place) -> _Place:
        """Return a place of this size: the same one, if the commits have the same length. Raises OSError."""
        if place[1] == length and place[0] >= 0:
            return place
        with self._growing:
            offset = self._end
            grow(self._fd, offset + length)
            self._end = offset + length + -length % mmap.ALLOCATIONGRANULARITY
        return offset, length

    def _verify(self, place: _Place, expected: int, tag: bytes, sealed_as: tuple[bytes, int, CommitId]) -> None:
        """Raise ValueError unless the bytes are those that a worker of this job has sealed."""
        owner, index, commit = sealed_as
        offset, length = place
        with mmap.mmap(self._fd, length, offset=offset) as mapped, memoryview(mapped) as content:
            if crc32c(content) != expected:
                raise ValueError(f"commit {commit} is damaged: its checksum is wrong")
            found = cut(content)
            header = part_tag(self._key, content[: found.random])
            rest = part_tag(self._key, content[found.random : found.tensors], content[found.objects :])
            wanted = commit_tag(self._key, owner, index, commit, length, expected, header, rest)
            if not hmac.compare_digest(tag, wanted):
                raise ValueError(f"commit {commit} was not written by a worker of this job")


def _copy(source: int, target: int, offset: int, length: int) -> None:
    """Copy a buffer to its place in a file, without a position that other threads share."""
    own = os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.lseek(own, offset, os.SEEK_SET)
        at = 0
        while at < length:
            copied = os.sendfile(own, source, at, length - at)
            if not copied:
                raise ValueError(f"the buffer ends before {length} bytes")
            at += copied
    finally:
        os.close(own)


def _write(fd: int, data: Any, at: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
