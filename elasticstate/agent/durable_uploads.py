"""Saves commits of this host as durable copies, or parts of them, on the driver's order, one at a time.

Training never waits for it. Threads stage the commits (staging.py), and a process of its own uploads them
(durable/upload.py). A process that makes no progress for ``--durable-timeout`` is killed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from elasticstate.agent.host_job import HostJob
from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.staging import (
    NoCommitError,
    Staged,
    StagingSlot,
    TornError,
    stage,
)
from elasticstate.agent.worker import start_command
from elasticstate.commits import owner_of
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.durable.stored_copies import (
    ABSENT,
    BUSY,
    HUNG,
    MEMORY,
    STORAGE,
    TORN,
    UNCHANGED,
)
from elasticstate.durable.upload import StagedPart, UploadMessage, UploadOrder
from elasticstate.exit_status import how_it_ended
from elasticstate.machine import format_bytes
from elasticstate.net.messages import (
    CompleteDurable,
    DurableFailed,
    DurablePart,
    DurableSaved,
    SaveDurable,
)
from elasticstate.processes import ended, kill_session
from elasticstate.replicas.store import ReplicaStore
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
        try:
            if isinstance(order, SaveDurable):
                staged = await self._stage(order)
                commit = staged.commit
            else:
                commit = order.commit
        except _NotStagedError as error:
            self._fail(order, error.kind, error.reason)
            return
        try:
            if isinstance(order, SaveDurable) and commit == order.saved:
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

    async def _stage(self, order: SaveDurable) -> Staged:
        """Copy the commits of the order within memory. Raises _NotStagedError."""
        opened: list[int] = []
        is_over = threading.Event()
        try:
            slots = [self._staging_slot(part.slot, opened) for part in order.parts]
            directory = os.dup(self._storage.directory.fd)
            opened.append(directory)
            arguments = (slots, self._job.key, directory, order.first, is_over, tuple(opened))
            staging = asyncio.ensure_future(in_thread(_stage_and_close, *arguments))
            opened.clear()
            try:
                return await asyncio.shield(staging)
            except asyncio.CancelledError:
                staging.add_done_callback(_discard)
                raise
        except OSError as error:
            path = self._storage.directory.path
            needed = format_bytes(sum(map(self._size_of, order.parts)))
            reason = f"{path} cannot hold one more copy of a commit, {needed}: {error.strerror}"
            raise _NotStagedError(MEMORY, reason) from error
        except NoCommitError as error:
            raise _NotStagedError(ABSENT, str(error)) from error
        except (TornError, ValueError) as error:
            raise _NotStagedError(TORN, str(error)) from error
        finally:
            is_over.set()
            for fd in opened:
                os.close(fd)

    def _staging_slot(self, slot: SlotId, opened: list[int]) -> StagingSlot:
        owner = owner_of(self._job.spec.job_id, slot.host, slot.slot)
        files = self._storage.slots().get(slot.slot) if slot.host == self._job.launch.host else None
        page, buffers = None, None
        if files is not None:
            page, buffers = files.page, (files.duplicate(0), files.duplicate(1))  # it may get other files meanwhile
            opened.extend(buffers)
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
            process = start_command(command, self._job.environment(), "/", readable, pipe)
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
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb")
        )
        last_line = ""
        try:
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
        finally:
            transport.close()

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


class _NotStagedError(Exception):
    """Commits could not be staged. ``kind``: see durable/stored_copies.py."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


def _stage_and_close(
    slots: list[StagingSlot],
    key: bytes,
    directory: int,
    first: CommitId | None,
    is_over: threading.Event,
    descriptors: tuple[int, ...],
) -> Staged:
    """Stage, and close the descriptors."""
    try:
        return stage(slots, key, directory, first, lambda: not is_over.is_set())
    finally:
        for fd in descriptors:
            os.close(fd)


def _discard(staging: asyncio.Future[Staged]) -> None:
    """Close the result of a staging that nobody waits for."""
    if not staging.cancelled() and staging.exception() is None:
        os.close(staging.result().fd)
