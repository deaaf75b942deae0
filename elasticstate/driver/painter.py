"""The process that writes to the terminal of ``elasticrun`` while a live line is at its bottom.

``python -m elasticstate.driver.painter OUTPUT LINE ANSWER``: descriptors of pipes. The terminal is stdout. The process
ends when no other can write to OUTPUT any more. See docs/decisions/output.md.

The line is drawn in the row below the cursor, and is erased before the next output. So the row of the cursor is empty
above the line while no output is open, and has what the user types. Of the output only these facts are taken: how many
rows below the cursor belong to it (nested progress bars move the cursor up), how wide its open line is, and if it ends
inside a sequence. One thing is added: a line that is written over a progress bar erases the bar first.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import terminal_size

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_SEPARATOR = " · "
_SAVE, _RESTORE, _PLAIN = b"\x1b7", b"\x1b8", b"\x1b[0m"
_INDEX = b"\x1bD"  # one row down in the same column; the screen scrolls if there is none
_ERASE_BELOW = b"\x1b[J"
_OPEN_BYTES = 4096  # of a line without an end that are kept
_LONGEST_SEQUENCE = 300
_UNFINISHED = re.compile(
    rb"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*)?|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
"""A sequence of escape (ECMA-48) or of UTF-8 that lacks its end."""
_LINE_OVER_BAR = re.compile(rb"\r(?=[^\r\n]+\n)")
_VERTICAL = re.compile(rb"\x1b\[(\d*)A|\n|\x1b\[[\d;]*[HfJ]|\x1bc")


def _over_bars(data: bytes, is_over_bar: bool) -> bytes:
    """Erase each progress bar before a whole line that is written over it: the line may be shorter."""
    return _LINE_OVER_BAR.sub(b"\r\x1b[K", b"\r" * is_over_bar + data)


class Painter:
    """State of a terminal with a line at its bottom. Each method returns the bytes to write, in one piece."""

    def __init__(self, size: Callable[[], terminal_size]) -> None:
        self._size = size
        self._parts: Sequence[str] = ()
        self._drawn = 0  # rows below the cursor where the line is; 0: nowhere
        self._below = 0  # rows below the cursor that belong to the output
        self._open = b""  # output since the last newline
        self._is_row_empty = False  # the row of the cursor, as far as known
        self._unfinished = b""
        self._console = Console(force_terminal=True, legacy_windows=False, highlight=False)

    def line(self, parts: Sequence[str]) -> bytes:
        """Show these parts, as many of them as fit. No parts: no line."""
        self._parts = parts
        return self._erased() + self._draw()

    def output(self, data: bytes) -> bytes:
        """Show output, above the line."""
        erased, is_over_bar = self._erased(), self._open.endswith(b"\r")
        self._follow(data)
        return erased + _over_bars(data, is_over_bar) + self._draw()

    def _follow(self, data: bytes) -> None:
        before, data = self._unfinished, self._unfinished + data
        unfinished = _UNFINISHED.search(data, max(0, len(data) - _LONGEST_SEQUENCE))
        self._unfinished = unfinished.group() if unfinished is not None else b""
        for move in _VERTICAL.finditer(data):
            if move.group() == b"\n":
                self._is_row_empty = not self._below
                self._below = max(0, self._below - 1)
            elif move.group().endswith(b"A"):
                self._below += max(1, int(move.group(1) or 1))
            else:
                self._below = 0
        _, end, rest = data.rpartition(b"\n")
        self._open = (rest if end else self._open + data[len(before) :])[-_OPEN_BYTES:]
        self._is_row_empty = self._is_row_empty and not self._open

    def _erased(self) -> bytes:
        rows, self._drawn = self._drawn, 0
        if not rows:
            return b""
        if self._is_row_empty and not self._below:  # keys that were pressed may have moved the cursor into the line
            return b"\r" + _SAVE + _PLAIN + _ERASE_BELOW + _RESTORE
        return _SAVE + b"\x1b[%dB\r" % rows + _PLAIN + _ERASE_BELOW + _RESTORE

    def _draw(self) -> bytes:
        size, rows = self._size(), self._below + 1
        if not self._parts or self._unfinished or rows >= size.lines or size.columns < 2 or self._is_at_edge(size):
            return b""
        if self._is_prompt:
            return b""
        self._drawn = rows
        room = _INDEX * rows + b"\x1b[%dA" % rows
        return room + _SAVE + b"\x1b[%dB\r" % rows + _PLAIN + self._text(size.columns - 1) + _RESTORE

    @property
    def _is_prompt(self) -> bool:
        """True if somebody may type an answer to the open line: no progress bar, which writes a line again and again.

        The end of the answer moves the cursor to the next row, where the line would be.
        """
        return bool(self._open) and b"\r" not in self._open and not self._below

    def _is_at_edge(self, size: terminal_size) -> bool:
        """Return True if the next character goes to a new row, which a move of the cursor would prevent."""
        if not self._open:
            return False
        width = Text.from_ansi(self._open.rpartition(b"\r")[2].decode(errors="replace")).cell_len
        return width > 0 and width % size.columns == 0

    def _text(self, columns: int) -> bytes:
        text = Text.assemble((self._parts[0], "bold"))
        text.truncate(columns, overflow="ellipsis")
        for part in self._parts[1:]:
            if text.cell_len + cell_len(_SEPARATOR + part) > columns:
                break
            text.append(_SEPARATOR, "dim").append(part)
        self._console.width = columns
        with self._console.capture() as capture:
            self._console.print(text, end="", no_wrap=True, crop=True)
        return capture.get().encode(errors="replace")


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
