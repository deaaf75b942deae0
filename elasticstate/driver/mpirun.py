"""``mpirun``, for the identities that the workers of an MPI job need (see elasticstate/mpi).

It outlives the driver, as the workers do. It must not die before them: Open MPI ends them then; so they are started
again, resume from their commits, and ask another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from elasticstate.mpi.broker import REQUESTS
from elasticstate.mpi_build import ULFM_OPTIONS, find_mpirun, mpirun_environment
from elasticstate.net.messages import Holder
from elasticstate.net.names import is_this_machine
from elasticstate.processes import kill_session, session_members

_DIRECTORY = "mpi"
_PID_FILE = "pid"
_LOG = "mpirun.log"


class Mpirun:
    """Of one job; started when the first worker asks for an identity."""

    def __init__(self, job_directory: Path) -> None:
        self._directory = job_directory / _DIRECTORY
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: int | None = None

    def ask(self, members: Iterable[Holder]) -> None:
        """Let holders of identities of one MPI job be started for these workers. Raises OSError: it cannot be run."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(self._directory / REQUESTS, 0o600)
        if self._requests is None:  # for reading, too, and for good: what nobody has open is empty
            self._requests = os.open(self._directory / REQUESTS, os.O_RDWR | os.O_NONBLOCK)
        if not self._lives():
            self._start()
        line = json.dumps([(None if is_this_machine(host) else host, pid, path) for host, pid, path in members])
        os.write(self._requests, line.encode() + b"\n")

    def stop(self) -> None:
        """At the end of the job: mpirun, and all that it has started."""
        pid = self._pid()
        if pid is not None:
            kill_session(pid)
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._requests is not None:
            os.close(self._requests)
            self._requests = None

    def _start(self) -> None:
        options = [*ULFM_OPTIONS, "--oversubscribe", "--bind-to", "none", "-n", "1"]
        broker = [sys.executable, "-m", "elasticstate.mpi.broker", str(self._directory)]
        with open(self._directory / _LOG, "ab") as log:
            self._process = subprocess.Popen(
                [find_mpirun() or "mpirun", *options, *broker],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=mpirun_environment(str(self._directory)),
                start_new_session=True,
            )
        (self._directory / _PID_FILE).write_text(str(self._process.pid))

    def _lives(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        pid = self._pid()
        return pid is not None and pid in session_members(pid)

    def _pid(self) -> int | None:
        try:
            return int((self._directory / _PID_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None
