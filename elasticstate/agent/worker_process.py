"""One worker's process: started in a session of its own, watched by pidfd, ended together with its whole session."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from elasticstate.agent import exec_shim
from elasticstate.agent.output import Pump
from elasticstate.core.types import WorkerId
from elasticstate.net.messages import STACKS_SIGNAL
from elasticstate.options import inherited_environment, missing_temporary_directory
from elasticstate.processes import CLEANUP_S, catches, descriptors_given, ended_child, kill_session
from elasticstate.threads import in_thread

_DRAIN_TIMEOUT_S = 2.0  # time for remaining output to arrive after the process has ended


class Ending(NamedTuple):
    """End of a process: exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    last_output: str  # the end of its stderr


def environment_of_workers(passed_on: Iterable[tuple[str, str]], given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Merge this process's environment, variables from the driver's host and the job's variables."""
    # The stack of a segmentation fault shows its cause.
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    needed = missing_temporary_directory()
    return {**defaults, **inherited_environment(), **dict(passed_on), **dict(given), **needed}


class Child(Protocol):
    """A started process that this process can wait for: ``subprocess.Popen``, or a ForkedChild."""

    pid: int

    def wait(self) -> int: ...


def start_command(
    command: Sequence[str], environment: Mapping[str, str], directory: str, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start a worker as a new process. Raises OSError if that fails."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", exec_shim.__file__, str(os.getpid()), str(descriptors_given()), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        cwd=directory,
        start_new_session=True,
    )


class WorkerProcess:
    """A started worker. ``ended()`` must be awaited once; until then the process id stays reserved."""

    def __init__(self, worker: WorkerId, child: Child, stdout: Pump, stderr: Pump, pipes: tuple[int, int]) -> None:
        """``pipes``: the ends from which this process reads the worker's stdout and stderr."""
        self.worker = worker
        self._process = child
        self._has_ended = False
        self._stderr = stderr
        out, err = (os.fdopen(pipe, "rb", buffering=0) for pipe in pipes)
        self._pumps = [asyncio.ensure_future(stdout.run(out)), asyncio.ensure_future(stderr.run(err))]

    @property
    def pid(self) -> int:
        """Process id; also the id of its session and of its process group."""
        return self._process.pid

    def ask_for_stacks(self) -> None:
        """Let it print the stacks of its threads, even if it was stopped. No effect if it cannot, or has ended."""
        if not self._has_ended and catches(self.pid, STACKS_SIGNAL):
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACKS_SIGNAL)
                os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to its process group. No effect after its end."""
        if not self._has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it. No effect after its end.

        The rest of its session is killed when the process has ended: not its process group at once, because a resource
        tracker of ``multiprocessing`` must outlive the processes whose semaphores it removes.
        """
        if not self._has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def ended(self) -> Ending:
        """Wait for the end of the process, kill the rest of its session, and pass on its remaining output."""
        await ended_child(self.pid)
        self._has_ended = True
        code = await in_thread(self._end_session)
        _, late = await asyncio.wait(self._pumps, timeout=_DRAIN_TIMEOUT_S)  # a detached process may hold a pipe
        for pump in late:
            pump.cancel()
        if code < 0:
            return Ending(None, -code, self._stderr.last_lines)
        return Ending(code, None, self._stderr.last_lines)

    def _end_session(self) -> int:
        """Kill the rest of the session; return the exit code, or -N after signal N.

        Call it in a thread: the kernel may wait for locks of /proc in both.
        """
        kill_session(self.pid, CLEANUP_S)  # before wait(): the zombie reserves the session id
        return self._process.wait()
