"""DurableUploads: saves commits of this host as durable copies, on the driver's order, one at a time.

Training never waits for it. A thread stages the commit (staging.py), and a process of its own uploads it
(durable/upload.py). A process that makes no progress for ``--durable-timeout`` is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from elasticstate.agent.driver_connection import DriverConnection
from elasticstate.agent.host_storage import HostStorage
from elasticstate.agent.staging import Staged, TornError, stage
from elasticstate.agent.worker_process import start_command
from elasticstate.durable.failure import BUSY, HUNG, MEMORY, STORAGE, TORN, UNCHANGED
from elasticstate.durable.upload import UploadMessage, UploadOrder
from elasticstate.exit_status import how_it_ended
from elasticstate.machine import format_bytes
from elasticstate.net.messages import DurableFailed, DurableSaved, JobSpec, SaveDurable
from elasticstate.processes import ended, kill_session
from elasticstate.threads import in_thread

_PROGRAM = "elasticstate.durable.upload"
_LAST_MOMENT_S = 0.2
_KILL_TIMEOUT_S = 5.0  # a process in a call that nothing can interrupt does not end when it is killed
_NO_COMMIT = "the slot holds no commit"


class DurableUploads:
    """Uploads of one agent. ``environment``: that of the workers, with the mark of this agent."""

    def __init__(
        self, spec: JobSpec, storage: HostStorage, key: bytes, environment: Mapping[str, str], driver: DriverConnection
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._key = key
        self._environment = environment
        self._driver = driver
        self._stuck: list[subprocess.Popen[bytes]] = []  # processes that were killed and have not ended
        self._task: asyncio.Task[None] | None = None

    def begin(self, order: SaveDurable) -> None:
        """Save a copy in the background. DurableSaved or DurableFailed follows."""
        if self._task is not None and not self._task.done():
            self._fail(order, BUSY, "the agent still saves another copy")
            return
        self._task = asyncio.ensure_future(self._save(order))

    async def close(self) -> None:
        """End the upload, at the end of the agent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _fail(self, order: SaveDurable, kind: str, reason: str) -> None:
        self._driver.send(DurableFailed(order.folder, kind, reason))

    async def _save(self, order: SaveDurable) -> None:
        began_at = time.monotonic()
        if not self._may_start():
            self._fail(order, HUNG, "the process of the last upload was killed and has not ended")
            return
        files = self._storage.slots().get(order.slot)
        if files is None:
            self._fail(order, STORAGE, _NO_COMMIT)
            return
        buffers = os.dup(files.buffers[0]), os.dup(files.buffers[1])  # the slot may get other files meanwhile
        owner, path = self._storage.owner(order.slot), self._storage.directory.path
        directory = os.dup(self._storage.directory.fd)
        try:
            staged = await in_thread(stage, files.page, buffers, owner, self._key, directory)
        except OSError as error:
            needed = format_bytes(max(os.fstat(fd).st_size for fd in buffers))
            reason = f"{path} cannot hold one more copy of a commit, {needed}: {error.strerror}"
            self._fail(order, MEMORY, reason)
            return
        except (TornError, ValueError) as error:
            self._fail(order, TORN, str(error))
            return
        finally:
            for fd in (*buffers, directory):
                os.close(fd)
        if staged is None:
            self._fail(order, STORAGE, _NO_COMMIT)
            return
        try:
            if staged.commit == order.saved:
                end = UploadMessage(kind=UNCHANGED)
            else:
                end = await self._upload(order, staged)
        except OSError as error:
            end = UploadMessage(kind=STORAGE, reason=f"the upload could not be started: {error}")
        finally:
            os.close(staged.fd)
        if end.is_saved:
            seconds = time.monotonic() - began_at
            self._driver.send(DurableSaved(order.folder, staged.commit, end.bytes, seconds, end.lost, end.warning))
        else:
            self._fail(order, end.kind, end.reason)

    def _may_start(self) -> bool:
        self._stuck = [process for process in self._stuck if process.poll() is None]
        return not self._stuck

    async def _upload(self, order: SaveDurable, staged: Staged) -> UploadMessage:
        """Start the process, and return its last message. Raises OSError if the start fails."""
        options = self._spec.options
        assert options.durable_dir is not None
        upload = UploadOrder(
            place=options.durable_dir,
            folder=order.folder,
            keep=options.durable_keep,
            job=self._spec.job,
            job_id=self._spec.job_id,
            commit=staged.commit,
            world_size=order.world_size,
            size_bytes=staged.size_bytes,
            earlier=order.earlier,
        )
        command = (sys.executable, "-m", _PROGRAM, msgspec.json.encode(upload).decode())
        readable = os.open(f"/proc/self/fd/{staged.fd}", os.O_RDONLY | os.O_CLOEXEC)
        messages, pipe = os.pipe()
        try:
            process = start_command(command, self._environment, "/", readable, pipe)
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
