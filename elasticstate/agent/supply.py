"""Files and key for the workers of a host: descriptors of the files of their slots, and the job's key.

If the files lose their names while the job runs, the agent moves the slots to new files (see agent/storage.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from elasticstate.agent.connection import DriverConnection
from elasticstate.agent.storage import HostStorage
from elasticstate.agent.worker import WorkerHandle
from elasticstate.agent.workers import Results
from elasticstate.core.ids import CommitId, SlotId, WorkerId
from elasticstate.errors import CommitStorageError
from elasticstate.net import messages
from elasticstate.net.link import WorkerConnection
from elasticstate.threads import in_thread

REMEDY = (
    "systemd-logind deletes the files of a user whose last session has ended. Run loginctl enable-linger, or set "
    "RemoveIPC=no in logind.conf."
)


class Supply:
    """Gives workers their files. ``begin`` starts a task; ``warn`` gets messages for the user at the driver; ``share``
    is ``HostCopies.share``."""

    def __init__(
        self,
        storage: HostStorage,
        handles: Mapping[WorkerId, WorkerHandle],
        key: bytes,
        call: bytes,
        begin: Callable[[Coroutine[Any, Any, object]], None],
        warn: Callable[[str], None],
        share: Callable[[SlotId, CommitId], tuple[int, tuple[int, int, int]] | None],
    ) -> None:
        self._storage = storage
        self._handles = handles
        self._key = key
        self._results = Results(key)
        self._call = _in_memory(call) if call else None
        self._begin = begin
        self._warn = warn
        self._share = share
        self._fault = ""  # error of the last attempt to create a new directory

    def give(self, request: messages.RequestStorage, connection: WorkerConnection) -> None:
        """Answer a worker that requests its files: at boot, or at a commit after the files have lost their names.

        Or it requests the commits of another slot, or a kept copy, which it only reads.
        """
        if request.copy is not None:
            self._begin(self._give_copy(*request.copy, connection))
        elif request.peer is None:
            self._begin(self._give(request.worker, connection))
        else:
            self._give_peer(request, connection)

    def _give_peer(self, request: messages.RequestStorage, connection: WorkerConnection) -> None:
        """Give the files of the slot that a worker wants to read: of another living worker."""
        living = {worker.slot for worker in self._handles if worker.slot != request.worker.slot}
        held = {slot: newest for slot in living if (newest := self._newest_seal(slot)) is not None}
        slot = request.peer if request.peer in living else -1
        if request.peer == -1 and held:
            slot = min(held, key=lambda slot: (-held[slot][0], -held[slot][1], slot))
        files = self._storage.slots().get(slot)
        connection.give(messages.Storage(self._key, False, slot), files.descriptors if files is not None else [])

    async def _give_copy(self, slot: SlotId, commit: CommitId, connection: WorkerConnection) -> None:
        try:
            found = await in_thread(self._share, slot, commit)
        except OSError:  # no descriptor is left: the worker reads from the copy server
            found = None
        fd, content = found if found is not None else (None, None)
        connection.give(messages.Storage(self._key, False, content=content), [] if fd is None else [fd])
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
        handle = self._handles[worker]
        if self._storage.files(worker.slot).page.is_stale:
            handle.waits += 1
            try:
                await self._storage.move(worker.slot, lambda: self._handles.get(worker) is handle)
            finally:
                handle.waits -= 1
        result = self._storage.result(worker.slot)
        if self._handles.get(worker) is handle and result is not None:
            files = self._storage.files(worker.slot)
            handle.liveness.storage_is(files.page)
            given = [*files.descriptors, result, *([] if self._call is None else [self._call])]
            connection.give(messages.Storage(self._key, self._call is not None), given)

    async def send_result(self, slot: int, offset: int, driver: DriverConnection) -> None:
        """Send a part of the result that a worker of ``launch()`` has returned."""
        driver.send(await in_thread(self._results.part, self._storage.result(slot), slot, offset))

    def check_files(self) -> None:
        """Check if files have been deleted since the last call. If so, warn, and move the slots without a worker."""
        directory = self._storage.directory
        before = directory.path
        try:
            if not self._storage.detect_loss():
                return
        except (OSError, CommitStorageError) as error:
            if self._fault != str(error):
                self._fault = str(error)
                self._warn(f"{before} was deleted, and cannot be created again ({error}). {REMEDY}")
            return
        self._fault = ""
        taken = "" if directory.path == before else f", {directory.path}, because another user has taken the name"
        self._warn(
            f"commits were deleted from {before} while the job runs. Workers and agent still hold them, and write the "
            f"next commits to a new directory{taken}. {REMEDY}"
        )
        inhabited = {worker.slot for worker in self._handles}
        for slot in self._storage.slots():
            if slot not in inhabited:
                self._begin(self._storage.move(slot, partial(self._is_empty, slot)))

    def _is_empty(self, slot: int) -> bool:
        return all(worker.slot != slot for worker in self._handles)


def _in_memory(data: bytes) -> int:
    """Return the descriptor of a file without a name that holds this data."""
    fd = os.memfd_create("elasticstate-call", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd
