"""Stores for worlds of plain workers: each world has a store of its own, as torchrun's agent provides it.

The agent listens on the port of the next store, and starts the process that serves it (worker/plain_store.py) at the
first connection. So an elastic job starts no such process, and a worker that connects early waits in the backlog.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from elasticstate.agent import exec_shim
from elasticstate.agent.host_job import HostJob
from elasticstate.agent.template_process import Child, Template, TemplateError, start_command
from elasticstate.core.types import PlainPlace
from elasticstate.net.link import ForkRequest, StoreListener
from elasticstate.net.messages import STORE_JOINED, NextStore, PlainStoreJoined
from elasticstate.processes import reading

_PROGRAM = str(Path(exec_shim.__file__).parents[1] / "worker" / "plain_store.py")


class PlainStores:
    """The stores of one agent: the one in use, and the next one."""

    def __init__(self, job: HostJob, template: Template | None) -> None:
        self._job = job
        self._template = template
        self._next = self._listen()
        self._used: asyncio.Task[None] | None = None
        self.joined = 0  # the newest plain world of which a worker has joined a store here

    def _listen(self) -> StoreListener | None:
        try:
            return StoreListener(self._job.local_address)
        except OSError as error:
            self._job.log(f"cannot listen at {self._job.local_address} for plain workers: {error.strerror or error}")
            return None

    @property
    def next_address(self) -> str:
        """Address of the store for the next world; "": there is none."""
        return "" if self._next is None else self._next.address

    def use(self, place: PlainPlace) -> None:
        """Serve the world of a worker that starts here, if its store is the next one of this host."""
        if self._next is None or place.store != self._next.address:
            return
        self._end_used()
        self._used = asyncio.ensure_future(self._serve(self._next, place.generation))
        self._next = self._listen()
        self._job.driver.send(NextStore(self.next_address))

    async def _serve(self, listener: StoreListener, generation: int) -> None:
        """Serve a store until this task is cancelled."""
        readable, writable = os.pipe()
        pidfd = -1
        try:
            try:
                await listener.first_connection()
                child = await self._start(listener, writable)
                pidfd = os.pidfd_open(child.pid)
            except (OSError, ValueError) as error:
                self._job.log(f"the store of plain workers could not be started: {error}")
                return
            finally:
                listener.close()
                os.close(writable)
            await self._read(readable, generation)
            with suppress(ChildProcessError):  # the agent's watch of orphans was faster
                child.wait()
        finally:
            if pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)

    async def _start(self, listener: StoreListener, stderr: int) -> Child:
        """Start the process that serves a store (worker/plain_store.py). Raises OSError."""
        environment = self._job.environment()
        command = (sys.executable, _PROGRAM, self._job.local_address, str(listener.port))
        if self._template is not None:
            with suppress(TemplateError):  # the workers' own starts have reported this
                return await self._template.fork(ForkRequest(command, "/", environment), listener.fileno(), stderr)
        return start_command(command, environment, "/", listener.fileno(), stderr)

    async def _read(self, pipe: int, generation: int) -> None:
        """Read what the process writes, until its end."""
        async with reading(os.fdopen(pipe, "rb")) as reader:
            while line := (await reader.readline()).decode(errors="replace").rstrip():
                if line == STORE_JOINED:
                    self.joined = generation
                    self._job.driver.send(PlainStoreJoined(generation))
                else:
                    self._job.log(f"store of plain workers: {line}")

    def _end_used(self) -> None:
        if self._used is not None:
            self._used.cancel()
            self._used = None

    def close(self) -> None:
        """End all stores: the workers have an elastic world, or the job is over."""
        self._end_used()
        self.close_next()

    def close_next(self) -> None:
        """Provide no further store: the command is elastic. The store in use shows whether all workers are."""
        if self._next is not None:
            self._next.close()
            self._next = None
            self._job.driver.send(NextStore(""))
