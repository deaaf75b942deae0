"""``python -m elasticstate.screen OUTPUT LINE ANSWER``: descriptors of pipes. The terminal is stdout.

A process of its own: a terminal that nobody reads holds only this process, and the agents of a dead driver go on
writing through it. It ends when no process can write to OUTPUT any more.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress

from elasticstate.screen.painter import Painter

_CHUNK_BYTES = 64 * 1024
_STALE_MS = 2000  # a driver that is stopped or stuck sends no line


class _Terminal:
    """Terminal with output and a line, from three pipes."""

    def __init__(self, output: int, line: int, answer: int) -> None:
        self._output, self._line, self._answer = output, line, answer
        self._has_output = True
        self._has_driver = True
        self._painter = Painter(lambda: os.get_terminal_size(1))
        os.set_blocking(output, False)

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._output, select.POLLIN)
        poller.register(self._line, select.POLLIN)
        while self._has_output:
            ready = [fd for fd, _ in poller.poll(_STALE_MS if self._has_driver else None)]
            if not ready:
                _write(self._painter.line(()))
            if self._output in ready:
                self._pass_output()
            if self._line in ready:
                self._read_lines()
                if not self._has_driver:
                    poller.unregister(self._line)
        _write(self._painter.line(()))

    def _pass_output(self) -> None:
        """Pass a piece of the output to the terminal, if there is any."""
        try:
            data = os.read(self._output, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self._has_output = bool(data)
        if data:
            _write(self._painter.output(data))

    def _read_lines(self) -> None:
        """Show the newest line. At a request, and at the end of the driver, remove the line, then answer."""
        data = os.read(self._line, _CHUNK_BYTES)  # whole lines: the driver's writes are atomic
        self._has_driver = bool(data)
        parts: Sequence[str] | None = json.loads(data.splitlines()[-1]) if data else None
        if not self._has_driver:
            self._pass_output()  # all that the driver has written: a pipe holds no more than one piece
            self._pass_output()  # finds the end, if there is no other process
        _write(self._painter.line(parts or ()))
        if parts is None:
            with suppress(BrokenPipeError):  # the driver has died
                os.write(self._answer, b"+" if self._has_output else b"-")


def _write(data: bytes) -> None:
    while data:
        select.select([], [1], [])  # another process may have made the shared file description non-blocking
        with suppress(BlockingIOError):
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    with suppress(OSError):  # the terminal is gone
        _Terminal(*map(int, sys.argv[1:])).run()
