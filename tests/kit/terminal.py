"""A pseudo-terminal, whose bytes a terminal emulator replays."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte

from tests.kit import forks

LINE = re.compile(r"^(waiting for|running|generation) .*")


class Terminal:
    """A pseudo-terminal with a program in its foreground."""

    def __init__(self, directory: Path, *command: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        job = f"live-{os.getpid()}"
        variables = {**os.environ, "TERM": "xterm", "ELASTICSTATE_JOB_NAME": job, **environment}
        self.process = _begin(directory, command, variables, slave)
        os.close(slave)
        self.screen = pyte.Screen(100, 30)
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.read_to_the_end()
        self.process.wait(30)
        os.close(self.master)

    @property
    def rows(self) -> list[str]:
        rows = [row.rstrip() for row in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def lines(self) -> list[str]:
        """Return the live lines on the screen."""
        return [row for row in self.rows if LINE.match(row)]

    def read(self) -> bool:
        """Read what is there, at least something within 60 s. Return False at the end."""
        assert select.select([self.master], [], [], 60)[0], f"the terminal got nothing more: {self.rows}"
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the last process has closed the terminal
            return False
        self.bytes += data
        self._stream.feed(data)
        return bool(data)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, f"has not come: {what}: {self.rows}"
            assert self.read(), f"ended without {what}: {self.rows}"
            assert len(self.lines()) <= 1
            assert not self.lines() or self.rows[-1] == self.lines()[0]

    def read_to_the_end(self) -> None:
        while self.read():
            pass

    def keys(self, data: bytes) -> None:
        os.write(self.master, data)


def _begin(
    directory: Path, command: tuple[str, ...], variables: dict[str, str], terminal: int
) -> forks.Forked | subprocess.Popen[bytes]:
    """Start a command in a session of its own, whose terminal this is. ``elasticrun`` forks from the template."""
    if command[:3] == (sys.executable, "-m", "elasticstate"):
        variables = forks.environment(variables)
        if forks.is_as_imported(forks.template().environment, variables):
            return forks.template().fork(command[1:], variables, (terminal, terminal, terminal), 1, directory)
    begin = "import fcntl, os, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\nos.execvp(sys.argv[1], sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", begin, *command],
        cwd=directory,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env=variables,
    )
