"""``mpirun``, which supplies the identities that the workers of an MPI job need (see __init__.py).

It runs on the driver's host only, because it would not survive the loss of one of its own daemons. It outlives the
driver, as the workers do. If it dies before the workers, Open MPI ends them: then they are started again, resume from
their commits, and get identities from a new ``mpirun``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate.mpi.broker import BELL, RELAY_PORT, RELEASED, REQUESTS, TOKEN
from elasticstate.mpi.installation import ULFM_OPTIONS, find_mpirun, mpirun_environment
from elasticstate.mpi.messages import Applicant, Identity
from elasticstate.net.names import is_this_machine
from elasticstate.processes import give_back_descriptors, kill_session, session_members

_DIRECTORY = "mpi"
_HELD = "held"  # host/process id of a worker: the file of its holder
_PID_FILE = "pid"
_LOG = "mpirun.log"
_END_TIMEOUT_S = 5.0  # time for killed processes to end
_LOOK_INTERVAL_S = 0.002


class Mpirun:
    """``mpirun`` of one job; started when the first worker requests an identity."""

    def __init__(self, job_directory: Path, connect_timeout_s: float, is_new_job: bool = False) -> None:
        """Prepare; nothing is started. A new job stops the ``mpirun`` of an earlier job with the same name."""
        self._directory = job_directory / _DIRECTORY
        self._connect_timeout_s = connect_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._bell: int | None = None
        if is_new_job:
            self._discard_earlier_job()

    @property
    def is_used(self) -> bool:
        """Return True if any worker has requested an identity."""
        return self._directory.exists()

    @property
    def pid(self) -> int | None:
        """Process id of ``mpirun`` while it lives, else None."""
        return self._last_pid() if self._lives() else None

    def request_identities(self, applicants: Sequence[Applicant], token: str = "") -> None:
        """Request identities of one MPI job for these workers. Workers on other hosts need the job's token.

        Raises OSError: mpirun cannot be run.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if not self._lives():
            self._start(token)
        # Release identities of an earlier request, for which these workers no longer wait.
        self._release([self._holder_file(host, pid) for host, pid, _ in applicants])
        wanted = []
        for host, pid, _ in applicants:
            path = self._holder_file(host, pid)
            path.parent.mkdir(parents=True, exist_ok=True)
            wanted.append((pid if is_this_machine(host) else 0, str(path)))
        self._send_to_broker({"hold": wanted})

    def identity(self, applicant: Applicant) -> Identity | None:
        """Return the worker's identity; None while it is not held yet."""
        try:
            held = json.loads(self._holder_file(applicant.host, applicant.pid).read_text())
            relay_port = 0 if is_this_machine(applicant.host) else int((self._directory / RELAY_PORT).read_text())
        except FileNotFoundError:  # not held yet, or the relay of a restarted mpirun is not open yet
            return None
        return Identity(applicant.path, tuple(held["environment"].items()), relay_port)

    def last_output(self) -> str:
        """Return the last line of its output, for a report: its log does not outlive the job."""
        lines = (self._directory / _LOG).read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip(" -")), "nothing")

    def end_identity(self, host: str, pid: int) -> None:
        """End the identity of an ended worker: on other hosts MPI cannot detect its end. MPI informs the others."""
        self._release([self._holder_file(host, pid)])

    def end_identities_of(self, host: str) -> None:
        """End the identities of a host whose workers have all ended, or no longer take part."""
        paths = (self._directory / _HELD / host).glob("*")
        self._release([path for path in paths if path.name.isdecimal()], host)  # no half-written file

    def has_ended(self, host: str, pid: int) -> bool:
        """Return True if a worker's identity has ended: MPI has informed the others that the worker is dead."""
        path = self._holder_file(host, pid)
        return path.with_suffix(RELEASED).exists() and not path.exists()

    def _discard_earlier_job(self) -> None:
        pid = self._last_pid()
        if pid is not None and any(str(self._directory) in _command(member) for member in session_members(pid)):
            self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def stop(self) -> None:
        """Stop mpirun with all processes that it has started, at the end of the job."""
        pid = self._last_pid()
        if pid is not None:
            kill_session(pid)
            deadline = time.monotonic() + _END_TIMEOUT_S
            while session_members(pid) and time.monotonic() < deadline:
                time.sleep(_LOOK_INTERVAL_S)
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None

    def _release(self, paths: Sequence[Path], host: str | None = None) -> None:
        released = [str(path.rename(path.with_suffix(RELEASED))) for path in paths if path.exists()]
        if released and self._lives():
            self._send_to_broker({"release": released, "host": host})

    def _send_to_broker(self, request: dict[str, object]) -> None:
        path = self._directory / REQUESTS / f"{time.monotonic_ns():020}"  # in order of time, also across drivers
        unnamed = path.with_suffix(".new")
        unnamed.write_text(json.dumps(request))
        unnamed.rename(path)
        if self._bell is None:  # open for reading, too, and kept open: a FIFO that nobody has open loses its data
            self._bell = os.open(self._directory / BELL, os.O_RDWR | os.O_NONBLOCK)
        with suppress(BlockingIOError):  # the FIFO is full, so enough bytes wait
            os.write(self._bell, b"\0")

    def _holder_file(self, host: str, pid: int) -> Path:
        return self._directory / _HELD / host / str(pid)

    def _start(self, token: str) -> None:
        (self._directory / RELAY_PORT).unlink(missing_ok=True)
        if token:
            (self._directory / TOKEN).touch(mode=0o600)
            (self._directory / TOKEN).write_text(token)
        (self._directory / REQUESTS).mkdir(exist_ok=True)
        for request_to_the_last_one in (self._directory / REQUESTS).iterdir():
            request_to_the_last_one.unlink()
        with suppress(FileExistsError):
            os.mkfifo(self._directory / BELL, 0o600)
        options = [*ULFM_OPTIONS, "--oversubscribe", "--bind-to", "none", "-n", "1"]
        broker = [sys.executable, "-m", "elasticstate.mpi.broker", str(self._directory), str(self._connect_timeout_s)]
        with open(self._directory / _LOG, "ab") as log:
            self._process = subprocess.Popen(
                [find_mpirun() or "mpirun", *options, *broker],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=mpirun_environment(str(self._directory)),
                start_new_session=True,
            )
        give_back_descriptors(self._process.pid)
        (self._directory / _PID_FILE).write_text(str(self._process.pid))

    def _lives(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        pid = self._last_pid()
        return pid is not None and pid in session_members(pid)

    def _last_pid(self) -> int | None:
        try:
            return int((self._directory / _PID_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
