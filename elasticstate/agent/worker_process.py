"""One worker's process: started in a session of its own, watched by pidfd, and ended with all that is left in it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, NamedTuple

from elasticstate.agent import exec_shim
from elasticstate.agent.output import Audience, Pump, Terminal
from elasticstate.config import WorkerEnvironment, inherited_environment
from elasticstate.core.types import WorkerId
from elasticstate.net.messages import STACKS_SIGNAL, Output
from elasticstate.processes import catches, ended_child, kill_session

_DRAIN_TIMEOUT_S = 2.0  # for output that is still on its way when the process has ended


class Ending(NamedTuple):
    """How a process ended: exactly one of ``exit_code`` and ``signal`` is set."""

    exit_code: int | None
    signal: int | None
    last_words: str  # the end of its stderr


def environment_of_worker(
    passed_on: Iterable[tuple[str, str]], given: Iterable[tuple[str, str]], told: WorkerEnvironment
) -> dict[str, str]:
    """This process's environment, what was passed on from the driver's host, what the job gives, and what we tell."""
    # The stack of a segmentation fault tells its cause. torch's own words on a peer's death are a page of C++ frames
    # each; the worker's exception tells the same.
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return {**defaults, **inherited_environment(), **dict(passed_on), **dict(given), **told.variables()}


class WorkerProcess:
    """A started worker. ``ended()`` must be awaited once; until then the process id stays taken."""

    def __init__(
        self,
        worker: WorkerId,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        stdout: Pump,
        stderr: Pump,
    ) -> None:
        """Starts the process. Raises OSError when that cannot be done."""
        self.worker = worker
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", exec_shim.__file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=directory,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stderr = stderr
        self._pumps = [
            asyncio.ensure_future(stdout.run(self._process.stdout)),
            asyncio.ensure_future(stderr.run(self._process.stderr)),
        ]

    @property
    def pid(self) -> int:
        """Also the id of its session and of its process group."""
        return self._process.pid

    def ask_for_stacks(self) -> None:
        """Let it print the stacks of its threads, even if it was stopped. No effect if it cannot, or has ended."""
        if self._process.returncode is None and catches(self.pid, STACKS_SIGNAL):
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACKS_SIGNAL)
                os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM to its process group. No effect after its end."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to its whole session. No effect after its end."""
        if self._process.returncode is None:
            kill_session(self.pid)

    async def ended(self) -> Ending:
        """Wait for the end of the process, end what is left of its session, and pass on what it has printed."""
        await ended_child(self.pid)
        kill_session(self.pid)  # before wait(): as long as there is a zombie, no other session has its id
        code = self._process.wait()
        _, late = await asyncio.wait(
            self._pumps, timeout=_DRAIN_TIMEOUT_S
        )  # a process that left the session has a pipe
        for pump in late:
            pump.cancel()
        if code < 0:
            return Ending(None, -code, self._stderr.last_lines)
        return Ending(code, None, self._stderr.last_lines)


def open_logs(directory: str | None, worker: WorkerId) -> tuple[BinaryIO | None, BinaryIO | None]:
    """The files of a slot, for stdout and stderr: appended to, never deleted. A line says where each process begins."""
    if directory is None:
        return None, None
    Path(directory).mkdir(parents=True, exist_ok=True)
    name = f"{worker.host}-{worker.slot}"
    out, err = (open(Path(directory, name + end), "ab", buffering=0) for end in (".out", ".err"))  # noqa: SIM115
    begin = f"--- {worker} starts at {datetime.now(timezone.utc).isoformat(timespec='milliseconds')}\n".encode()
    out.write(begin)
    err.write(begin)
    return out, err


def make_pumps(
    worker: WorkerId, terminals: tuple[Terminal, Terminal], output: Output, audience: Audience
) -> tuple[Pump, Pump]:
    """For stdout and stderr of a worker. Raises OSError when the log files cannot be made."""
    tag = f"[{worker.seat}] " if output.tagged else ""
    out, err = open_logs(output.log_dir, worker)
    stdout = Pump(terminals[0], tag, out, audience if output.tee & 1 else None)
    return stdout, Pump(terminals[1], tag, err, audience if output.tee & 2 else None)
