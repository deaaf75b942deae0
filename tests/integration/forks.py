"""Scripts that fork from one process that has imported torch, as workers do. A new process would import torch anew."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = Path(__file__).parent / "scripts" / "script_template.py"
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """The process of a script: a child of this process that this process has not forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a script", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self.returncode


class Template:
    """The process from which scripts fork. ``lasting``: the processes that the check after each test leaves alone."""

    def __init__(self, lasting: set[int]) -> None:
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = [sys.executable, str(PROGRAM), str(end.fileno()), str(os.getpid())]
        with end:
            self._process = subprocess.Popen(
                program, pass_fds=[end.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self._lasting = lasting
        lasting.add(self._process.pid)

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._process.wait()
        self._lasting.remove(self._process.pid)

    def fork(
        self,
        command: Sequence[object],
        environment: Mapping[str, str] = os.environ,
        descriptors: tuple[int, int, int] = (0, 1, 2),
    ) -> Forked:
        """Start a script. ``command``: its path and arguments. ``descriptors``: its stdin, stdout and stderr."""
        request = json.dumps([list(map(str, command)), dict(environment)]).encode()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._link, [request], list(descriptors))
            pid = int(self._link.recv(100))
            while _parent(pid) != os.getpid():
                time.sleep(0.0005)
        finally:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return Forked(pid)


class Started:
    """A script that a template has started. It writes into the files ``output``.out and ``output``.err."""

    def __init__(
        self,
        template: Template,
        output: Path,
        command: Sequence[object],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._stdout, self._stderr = output.with_suffix(".out"), output.with_suffix(".err")
        with open(os.devnull) as nothing, self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            descriptors = (nothing.fileno(), stdout.fileno(), stderr.fileno())
            self._process = template.fork(command, environment, descriptors)

    def finish(self, timeout: float) -> tuple[int, str, str]:
        """Wait for the end. Return the exit status, or -N after signal N, and what the script has printed."""
        return self._process.wait(timeout), self._stdout.read_text(), self._stderr.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
