"""Supply: gives the workers of a host the files of their slots and the job's key, and the driver their results.

If the files lose their names while the job runs, the agent moves the slots to new files (see agent/host_storage.py).
"""

from __future__ import annotations

import asyncio
import hmac
import os
from contextlib import suppress
from functools import partial

from elasticstate.agent.host_job import HostJob
from elasticstate.agent.host_storage import HostStorage
from elasticstate.commits import RESULT_HEAD_BYTES, result_hasher
from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.errors import CommitStorageError
from elasticstate.net import messages
from elasticstate.net.link import AgentSocket, WorkerConnection
from elasticstate.replicas.store import ReplicaStore
from elasticstate.threads import in_thread

_REMEDY = (
    "systemd-logind deletes the files of a user whose last session has ended. Run loginctl enable-linger, or set "
    "RemoveIPC=no in logind.conf."
)
_PART_BYTES = 1 << 20
_LOST = 1  # size sent without data: the driver then reports the result as lost
_LOOK_INTERVAL_S = 0.25


class Supply:
    """Gives workers their files."""

    def __init__(self, job: HostJob, storage: HostStorage, copies: ReplicaStore) -> None:
        self._job = job
        self._storage = storage
        self._copies = copies
        self._results = Results(job.key)
        self._call = _in_memory(job.spec.call) if job.spec.call else None
        self._fault = ""  # error of the last attempt to create a new directory

    def give(self, request: messages.RequestStorage, connection: WorkerConnection) -> None:
        """Answer a worker that requests its files: at boot, or at a commit after the files have lost their names.

        Or it requests the commits of another slot, or a kept copy, which it only reads.
        """
        if request.copy is not None:
            self._job.begin(self._give_copy(*request.copy, connection))
        elif request.peer is None:
            self._job.begin(self._give(request.worker, connection))
        else:
            self._give_peer(request, connection)

    def _give_peer(self, request: messages.RequestStorage, connection: WorkerConnection) -> None:
        """Give the files of the slot that a worker wants to read: of another living worker."""
        living = {worker.slot for worker in self._job.handles if worker.slot != request.worker.slot}
        held = {slot: newest for slot in living if (newest := self._newest_seal(slot)) is not None}
        slot = request.peer if request.peer in living else -1
        if request.peer == -1 and held:
            slot = min(held, key=lambda slot: (-held[slot][0], -held[slot][1], slot))
        files = self._storage.slots().get(slot)
        connection.give(messages.Storage(self._job.key, False, slot), files.descriptors if files is not None else [])

    async def _give_copy(self, slot: SlotId, commit: CommitId, connection: WorkerConnection) -> None:
        try:
            found = await in_thread(self._copies.share, slot, commit)
        except OSError:  # no descriptor is left: the worker reads from the copy server
            found = None
        fd, content = found if found is not None else (None, None)
        connection.give(messages.Storage(self._job.key, False, content=content), [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)

    def _newest_seal(self, slot: int) -> tuple[int, int] | None:
        """Return generation and tick of the newest commit in a slot."""
        files, owner = self._storage.slots().get(slot), self._storage.owner(slot)
        if files is None:
            return None
        seals = [seal[:2] for index in (0, 1) if (seal := files.page.sealed(index, owner)) is not None]
        return max(seals, default=None)

    async def _give(self, worker: WorkerId, connection: WorkerConnection) -> None:
        handle = self._job.handles[worker]
        if self._storage.files(worker.slot).page.is_stale:
            handle.waits += 1
            try:
                await self._storage.move(worker.slot, lambda: self._job.handles.get(worker) is handle)
            finally:
                handle.waits -= 1
        result = self._storage.result(worker.slot)
        if self._job.handles.get(worker) is handle and result is not None:
            files = self._storage.files(worker.slot)
            handle.liveness.storage_is(files.page)
            given = [*files.descriptors, result, *([] if self._call is None else [self._call])]
            connection.give(messages.Storage(self._job.key, self._call is not None), given)

    async def send_result(self, slot: int, offset: int) -> None:
        """Send a part of the result that a worker of ``launch()`` has returned."""
        self._job.driver.send(await in_thread(self._results.part, self._storage.result(slot), slot, offset))

    async def watch_files(self, socket: AgentSocket) -> None:
        """Look regularly, until cancelled, if files of this agent were deleted, and create them again."""
        place, used = self._job.place, self._storage.directory.fd
        while True:
            self._check_commits()
            directory = self._storage.directory.fd
            with suppress(OSError):  # retried at the next look
                if directory != used:
                    self._copies.move_to(directory)
                    used = directory
            with suppress(OSError):
                if place.is_lost or socket.is_lost:
                    if place.is_lost:
                        place.make_anew()
                    socket.reopen(place.socket)
                    self._job.warn(
                        f"the socket of this agent was deleted while the job runs. The new one is {place.socket}. "
                        f"{_REMEDY}"
                    )
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _check_commits(self) -> None:
        """Check if commits have been deleted since the last call. If so, warn, and move the slots without a worker."""
        directory = self._storage.directory
        before = directory.path
        try:
            if not self._storage.detect_loss():
                return
        except (OSError, CommitStorageError) as error:
            if self._fault != str(error):
                self._fault = str(error)
                self._job.warn(f"{before} was deleted, and cannot be created again ({error}). {_REMEDY}")
            return
        self._fault = ""
        taken = "" if directory.path == before else f", {directory.path}, because another user has taken the name"
        self._job.warn(
            f"commits were deleted from {before} while the job runs. Workers and agent still hold them, and write the "
            f"next commits to a new directory{taken}. {_REMEDY}"
        )
        inhabited = {worker.slot for worker in self._job.handles}
        for slot in self._storage.slots():
            if slot not in inhabited:
                self._job.begin(self._storage.move(slot, partial(self._is_empty, slot)))

    def _is_empty(self, slot: int) -> bool:
        return all(worker.slot != slot for worker in self._job.handles)


def _in_memory(data: bytes) -> int:
    """Return the descriptor of a file without a name that holds this data."""
    fd = os.memfd_create("elasticstate-call", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


class Results:
    """Results of the workers of one host for ``launch()``, which the driver fetches part by part.

    The file of a result begins with a keyed checksum of the rest, which the worker writes last. So a result is known to
    be complete, and written by a worker of this job, before anything unpickles it. ``key``: of the job's storage.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sizes: dict[int, int] = {}  # by slot; of verified results

    def part(self, fd: int | None, slot: int, offset: int) -> messages.Fetched:
        """Return the part at ``offset``. The first call reads the whole result: call it in a thread."""
        if fd is None:
            return messages.Fetched(slot, offset, b"", 0)
        if offset == 0:
            self._sizes[slot] = self._verified_size(fd)
        size = self._sizes.get(slot, _LOST)
        if size < 0:
            return messages.Fetched(slot, offset, b"", _LOST)
        return messages.Fetched(slot, offset, os.pread(fd, _PART_BYTES, RESULT_HEAD_BYTES + offset), size)

    def _verified_size(self, fd: int) -> int:
        """Return the size; 0 if nothing was returned; -1 if no worker of this job has written the file."""
        size = os.fstat(fd).st_size - RESULT_HEAD_BYTES
        if size < 0:
            return 0 if size == -RESULT_HEAD_BYTES else -1
        hasher = result_hasher(self._key)
        at = RESULT_HEAD_BYTES
        while data := os.pread(fd, _PART_BYTES, at):
            hasher.update(data)
            at += len(data)
        return size if hmac.compare_digest(os.pread(fd, RESULT_HEAD_BYTES, 0), hasher.digest()) else -1
