"""``mpirun``, for the identities that the workers of an MPI job need (see elasticstate/mpi).

It runs on the driver's host only, whatever hosts the job has: it would not survive the loss of one of its own daemons.
It outlives the driver, as the workers do. It must not die before them: Open MPI ends them then; so they are started
again, resume from their commits, and ask another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate.mpi.broker import BELL, RELAY_PORT, RELEASED, REQUESTS, TOKEN
from elasticstate.mpi_build import ULFM_OPTIONS, find_mpirun, mpirun_environment
from elasticstate.net.messages import Applicant, Identity
from elasticstate.net.names import is_this_machine
from elasticstate.processes import kill_session, session_members

_DIRECTORY = "mpi"
_HELD = "held"  # host/process id of a worker: the file of its holder
_PID_FILE = "pid"
_LOG = "mpirun.log"
_END_TIMEOUT_S = 5.0  # of processes that have been killed
_LOOK_INTERVAL_S = 0.002


class Mpirun:
    """Of one job; started when the first worker asks for an identity."""

    def __init__(self, job_directory: Path, connect_timeout_s: float) -> None:
        self._directory = job_directory / _DIRECTORY
        self._connect_timeout_s = connect_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._bell: int | None = None

    @property
    def is_used(self) -> bool:
        """Whether any worker has asked for an identity."""
        return self._directory.exists()

    @property
    def pid(self) -> int | None:
        """Its process id, while it lives."""
        return self._pid() if self._lives() else None

    def ask(self, members: Sequence[Applicant], token: str = "") -> None:
        """Have identities of one MPI job held for these workers. With the job's token those of other hosts can use it.

        Raises OSError: mpirun cannot be run.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if not self._lives():
            self._start(token)
        self._release([self._held(host, pid) for host, pid, _ in members])  # identities that they did not wait for
        wanted = []
        for host, pid, _ in members:
            path = self._held(host, pid)
            path.parent.mkdir(parents=True, exist_ok=True)
            wanted.append((pid if is_this_machine(host) else 0, str(path)))
        self._request({"hold": wanted})

    def identity(self, member: Applicant) -> Identity | None:
        """What the worker is to be told, as soon as its identity is held."""
        try:
            held = json.loads(self._held(member.host, member.pid).read_text())
            relay_port = 0 if is_this_machine(member.host) else int((self._directory / RELAY_PORT).read_text())
        except FileNotFoundError:  # the second: it has been started anew, and that one is not as far
            return None
        return Identity(member.path, tuple(held["environment"].items()), relay_port)

    def last_words(self) -> str:
        """The last line that it has printed: its log does not outlive the job."""
        lines = (self._directory / _LOG).read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip(" -")), "nothing")

    def ended(self, host: str, pid: int) -> None:
        """A worker has: so its identity ends, which on other hosts nobody sees. MPI tells the others."""
        self._release([self._held(host, pid)])

    def lost(self, host: str) -> None:
        """All workers of a host have ended, or do not take part any more."""
        paths = (self._directory / _HELD / host).glob("*")
        self._release([path for path in paths if path.name.isdecimal()], host)  # no half-written one

    def has_ended(self, host: str, pid: int) -> bool:
        """Whether a worker had an identity, and has it no more: MPI has told the others that it is dead."""
        path = self._held(host, pid)
        return path.with_suffix(RELEASED).exists() and not path.exists()

    def stop(self) -> None:
        """At the end of the job: mpirun, and all that it has started."""
        pid = self._pid()
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
        held = [str(path.rename(path.with_suffix(RELEASED))) for path in paths if path.exists()]
        if held and self._lives():
            self._request({"release": held, "host": host})

    def _request(self, what: dict[str, object]) -> None:
        request = self._directory / REQUESTS / f"{time.monotonic_ns():020}"  # in their order, whichever driver's
        unnamed = request.with_suffix(".new")
        unnamed.write_text(json.dumps(what))
        unnamed.rename(request)
        if self._bell is None:  # for reading, too, and for good: what nobody has open is empty
            self._bell = os.open(self._directory / BELL, os.O_RDWR | os.O_NONBLOCK)
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._bell, b"\0")

    def _held(self, host: str, pid: int) -> Path:
        return self._directory / _HELD / host / str(pid)

    def _start(self, token: str) -> None:
        (self._directory / RELAY_PORT).unlink(missing_ok=True)
        if token:
            (self._directory / TOKEN).touch(mode=0o600)
            (self._directory / TOKEN).write_text(token)
        (self._directory / REQUESTS).mkdir(exist_ok=True)
        for of_the_last_one in (self._directory / REQUESTS).iterdir():
            of_the_last_one.unlink()
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
