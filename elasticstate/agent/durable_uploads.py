"""Saves commits of this host as durable copies, or parts of them, on the driver's order, one at a time.

Training never waits for it. Threads *stage* the commits: they copy them while the workers train on. A copy is whole if
the buffer has the same seal before and after it, and the checksum of the copy is that of the seal. A process of its own
uploads the copies (durable/upload.py). If it makes no progress for ``--durable-timeout``, it is killed.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from elasticstate._native import ControlPage
from elasticstate.agent.host_job import HostJob
from elasticstate.agent.host_storage import HostStorage, copy_bytes
from elasticstate.agent.supervisor import Seal, seals_of
from elasticstate.agent.template_process import start_command
from elasticstate.commits import commit_tag, grow, owner_of, part_tag
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.durable.parts import cut
from elasticstate.durable.stored_copies import ABSENT, BUSY, HUNG, MEMORY, STORAGE, TORN, UNCHANGED, crc32c
from elasticstate.durable.upload import StagedPart, UploadMessage, UploadOrder
from elasticstate.failures import how_it_ended
from elasticstate.machine import format_bytes
from elasticstate.net.messages import CompleteDurable, DurableFailed, DurablePart, DurableSaved, Place, SaveDurable
from elasticstate.private import make_file
from elasticstate.processes import ended, kill_session, reading
from elasticstate.replicas.store import ReplicaStore, Source
from elasticstate.threads import in_thread

_PROGRAM = "elasticstate.durable.upload"
_LAST_MOMENT_S = 0.2
_KILL_TIMEOUT_S = 5.0  # a process in a call that nothing can interrupt does not end when it is killed


Order = SaveDurable | CompleteDurable


class DurableUploads:
    """Uploads of one agent."""

    def __init__(self, job: HostJob, storage: HostStorage, copies: ReplicaStore) -> None:
        self._job = job
        self._storage = storage
        self._copies = copies
        self._stuck: list[subprocess.Popen[bytes]] = []  # processes that were killed and have not ended
        self._task: asyncio.Task[None] | None = None
        self._folder = ""  # of the copy that the task saves

    def begin(self, order: Order) -> None:
        """Carry out an order in the background. DurableSaved or DurableFailed follows."""
        if self._task is not None and not self._task.done():
            self._fail(order, BUSY, "the agent still saves another copy")
            return
        self._folder = order.folder
        self._task = asyncio.ensure_future(self._save(order))

    def drop(self, folder: str) -> None:
        """End the upload for a copy that has failed."""
        if self._task is not None and self._folder == folder:
            self._task.cancel()

    async def close(self) -> None:
        """End the upload, at the end of the agent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _fail(self, order: Order, kind: str, reason: str) -> None:
        self._job.driver.send(DurableFailed(order.folder, kind, reason))

    async def _save(self, order: Order) -> None:
        began_at = time.monotonic()
        if not self._may_start():
            self._fail(order, HUNG, "the process of the last upload was killed and has not ended")
            return
        staged: Staged | None = None
        if isinstance(order, CompleteDurable):
            commit = order.commit
        elif (staged := await self._stage(order)) is not None:
            commit = staged.commit
        else:
            return
        try:
            if isinstance(order, SaveDurable) and order.saved is not None and commit <= order.saved:
                # Not newer: what a job has resumed from a copy has an older id until the first commit.
                end = UploadMessage(kind=UNCHANGED)
            else:
                end = await self._upload(order, commit, staged)
        except OSError as error:
            end = UploadMessage(kind=STORAGE, reason=f"the upload could not be started: {error}")
        finally:
            if staged is not None:
                os.close(staged.fd)
        if end.is_saved:
            seconds = time.monotonic() - began_at
            self._job.driver.send(DurableSaved(order.folder, commit, end.bytes, seconds, end.lost, end.warning))
        else:
            self._fail(order, end.kind, end.reason)

    async def _stage(self, order: SaveDurable) -> Staged | None:
        """Copy the commits of the order within memory. If that fails, report it and return None."""
        is_over = threading.Event()
        try:
            with ExitStack() as opened:
                slots = [self._staging_slot(part.slot, opened) for part in order.parts]
                directory = os.dup(self._storage.directory.fd)
                opened.callback(os.close, directory)
                kept_open = opened.pop_all()

            def copy() -> Staged:
                with kept_open:
                    return stage(slots, self._job.key, directory, order.first, lambda: not is_over.is_set())

            staging = asyncio.ensure_future(in_thread(copy))
            try:
                return await asyncio.shield(staging)
            except asyncio.CancelledError:
                staging.add_done_callback(_discard)
                raise
        except OSError as error:
            needed = format_bytes(sum(map(self._size_of, order.parts)))
            where = self._storage.directory.path
            self._fail(order, MEMORY, f"{where} cannot hold one more copy of a commit, {needed}: {error.strerror}")
        except NoCommitError as error:
            self._fail(order, ABSENT, str(error))
        except (TornError, ValueError) as error:
            self._fail(order, TORN, str(error))
        finally:
            is_over.set()
        return None

    def _staging_slot(self, slot: SlotId, opened: ExitStack) -> StagingSlot:
        owner = owner_of(self._job.spec.job_id, slot.host, slot.slot)
        files = self._storage.slots().get(slot.slot) if slot.host == self._job.launch.host else None
        page, buffers = None, None
        if files is not None:
            page, buffers = files.page, (files.duplicate(0), files.duplicate(1))  # it may get other files meanwhile
            for fd in buffers:
                opened.callback(os.close, fd)
        return StagingSlot(str(slot), owner, page, buffers, functools.partial(self._copies.open, slot))

    def _size_of(self, part: DurablePart) -> int:
        files = self._storage.slots().get(part.slot.slot) if part.slot.host == self._job.launch.host else None
        return max(os.fstat(fd).st_size for fd in files.buffers) if files is not None else 0

    def _may_start(self) -> bool:
        self._stuck = [process for process in self._stuck if process.poll() is None]
        return not self._stuck

    async def _upload(self, order: Order, commit: CommitId, staged: Staged | None) -> UploadMessage:
        """Start the process, and return its last message. Raises OSError if the start fails."""
        options = self._job.options
        assert options.durable_dir is not None
        parts: tuple[StagedPart, ...] = ()
        if isinstance(order, SaveDurable) and staged is not None:
            places = zip(order.parts, staged.places, strict=True)
            parts = tuple(StagedPart(part.number, part.digest, *place) for part, place in places)
        upload = UploadOrder(
            place=options.durable_dir,
            folder=order.folder,
            keep=options.durable_keep,
            job=self._job.spec.job,
            job_id=self._job.spec.job_id,
            commit=commit,
            world_size=order.world_size,
            total=order.total,
            parts=parts,
            earlier=order.earlier,
        )
        command = (sys.executable, "-m", _PROGRAM, msgspec.json.encode(upload).decode())
        source = os.devnull if staged is None else f"/proc/self/fd/{staged.fd}"
        readable = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        messages, pipe = os.pipe()
        try:
            process = start_command(command, self._job.environment(), "/", subprocess.DEVNULL, readable, pipe)
        except BaseException:
            os.close(messages)
            raise
        finally:
            os.close(readable)
            os.close(pipe)
        end: UploadMessage | None = None
        try:
            end = await self._follow(messages, options.durable_timeout_s)
        finally:
            code = await self._end(process)
        if end is not None:
            return end
        how = "does not end" if code is None else how_it_ended(code)
        return UploadMessage(kind=STORAGE, reason=f"the process of the upload {how}")

    async def _follow(self, pipe: int, timeout_s: float) -> UploadMessage | None:
        """Return the last message of the process; None if it ends without one."""
        last_line = ""
        async with reading(os.fdopen(pipe, "rb")) as reader:
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), timeout_s)
                except asyncio.TimeoutError:
                    reason = f"the storage makes no progress within --durable-timeout of {timeout_s:g} s"
                    return UploadMessage(kind=HUNG, reason=reason)
                if not line:
                    return UploadMessage(kind=STORAGE, reason=last_line) if last_line else None
                try:
                    message = msgspec.json.decode(line, type=UploadMessage)
                except msgspec.DecodeError:  # Python's own, for example a traceback before the program begins
                    last_line = line.decode(errors="replace").strip() or last_line
                    continue
                if message.is_saved or message.kind:
                    return message

    async def _end(self, process: subprocess.Popen[bytes]) -> int | None:
        """Kill what is left of the process. Return its exit status, or None if it does not end."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return process.poll()
        try:
            waiting = asyncio.ensure_future(ended(pidfd))
            done, _ = await asyncio.wait({waiting}, timeout=_LAST_MOMENT_S)
            if not done:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await in_thread(kill_session, process.pid)
            done, _ = await asyncio.wait({waiting}, timeout=_KILL_TIMEOUT_S)
            if not done:
                waiting.cancel()
                self._stuck.append(process)
                return None
        finally:
            os.close(pidfd)
        return process.wait()


def _discard(staging: asyncio.Future[Staged]) -> None:
    """Close the result of a staging that nobody waits for."""
    if not staging.cancelled() and staging.exception() is None:
        os.close(staging.result().fd)


_FILE = "durable.part"
_ATTEMPTS = 8
_PIECE_BYTES = 64 << 20
_LOOK_INTERVAL_S = 0.002
_COMING_S = 15.0

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
            copy_bytes(slot.buffers[index], self._fd, *place)
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

    def _find(self, slot: StagingSlot) -> tuple[int, Seal]:
        """Return the buffer that has the commit, and its seal. Wait for a commit that is still to come."""
        if slot.page is None:
            raise NoCommitError(f"this host keeps no copy of commit {self._first} of {slot.name}")
        until = time.monotonic() + _COMING_S
        while True:
            seals = seals_of(slot.page, slot.owner)
            in_order = list(seals)
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
        seals = {} if slot.page is None else seals_of(slot.page, slot.owner)
        return self._reserve([*seals.values()][-1][3], (-1, 0)) if seals else (-1, 0)

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


def _write(fd: int, data: Any, at: int) -> None:
    while len(data):
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
