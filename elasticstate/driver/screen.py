"""Screen: the driver's end of the process that writes to the terminal."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from elasticstate.options import Options, has_cursor_control

_LONGEST_PART = 200  # a line must fit into PIPE_BUF, so that it is written as a whole
_ANSWER_S = 0.5  # a terminal that is read shows a line sooner


class Screen:
    """A terminal with a live line. All output of this process and its children goes there through a pipe.

    The methods never block, except those that say how long.
    """

    def __init__(self) -> None:
        """Start the process, and redirect the descriptors 1 and 2 as far as they are the terminal. Raises OSError."""
        reading, writing = os.pipe()
        line, self._line = os.pipe()
        self._answer, answer = os.pipe()
        os.set_blocking(self._line, False)
        self.terminal = os.dup(2)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elasticstate.driver.painter", *map(str, (reading, line, answer))],
                stdin=subprocess.DEVNULL,
                stdout=2,
                cwd=Path(__file__).parents[2],  # first in sys.path: the process imports this very package
                pass_fds=(reading, line, answer),
                start_new_session=True,  # the keys of the terminal are for the driver
            )
        finally:
            for fd in (reading, line, answer):
                os.close(fd)
        device = os.fstat(self.terminal).st_rdev
        self._redirected = [fd for fd in (1, 2) if os.isatty(fd) and os.fstat(fd).st_rdev == device]
        for fd in self._redirected:
            os.dup2(writing, fd)
        os.close(writing)

    def show(self, parts: Sequence[str]) -> None:
        """Show these parts as the live line, unless the terminal is not read. No parts: no line."""
        self._send([part[:_LONGEST_PART] for part in parts])

    def _send(self, parts: Sequence[str] | None) -> None:
        with suppress(OSError):  # the pipe is full, as the terminal is not read; or the process is dead
            os.write(self._line, json.dumps(parts).encode() + b"\n")

    def hide(self) -> None:
        """Remove the line, and wait until the terminal shows that; not long if nobody reads the terminal."""
        while _is_readable(self._answer, 0.0):
            if not os.read(self._answer, 1):
                return
        self._send(None)
        if _is_readable(self._answer, _ANSWER_S):
            os.read(self._answer, 1)

    def close(self, timeout_s: float) -> None:
        """Let this process write to the terminal itself again, after all output; wait at most ``timeout_s`` for that.

        Agents that outlive this process continue to write through the other one.
        """
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        for fd in self._redirected:
            os.dup2(self.terminal, fd)
        os.close(self.terminal)
        while _is_readable(self._answer, 0.0) and os.read(self._answer, 1):
            pass
        os.close(self._line)
        answer, deadline = b"", time.monotonic() + timeout_s
        if _is_readable(self._answer, timeout_s):
            answer = os.read(self._answer, 1)
        os.close(self._answer)
        if answer != b"+":
            self._end(max(0.0, deadline - time.monotonic()))

    def _end(self, timeout_s: float) -> None:
        """Wait for the end of the process, which has nothing more to write unless the terminal is not read."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def screen_for(options: Options) -> Iterator[Screen | None]:
    """Take over the terminal for a job, if there is one and ``options`` want a live line. Else yield None."""
    if not (options.call_directory is None and os.isatty(2) and has_cursor_control()):
        yield None
        return
    try:
        screen = Screen()
    except OSError:  # no descriptor or no process is left: the job has its lines without it
        yield None
        return
    try:
        yield screen
    finally:
        screen.close(options.stop_timeout_s)


def _is_readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])
