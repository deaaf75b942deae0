"""Messages of libraries in the driver's process, written by the thread that may block instead of the event loop.

A terminal that nobody reads blocks whoever writes to it. asyncio, aiohttp and warnings write to ``sys.stderr``.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from elasticstate.driver.counted_lines import CountedLines
from elasticstate.writing import Writer

_LONGEST_TEXT = 500  # characters
_MOST_TRACES = 10  # one for each kind of errors
_MOST_FRAMES = 12  # the innermost ones


@contextmanager
def captured(terminal: Writer, warn: Callable[[str], None]) -> Iterator[None]:
    """Until the end, send text for ``sys.stderr`` to ``terminal``, and log records as counted lines to ``warn``.

    Call this on the event loop, where ``warn`` is called, too.
    """
    handler, before = _Handler(warn), sys.stderr
    logging.getLogger().addHandler(handler)
    sys.stderr = io.TextIOWrapper(
        cast("io.BufferedWriter", _Stderr(terminal)), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    try:
        yield
    finally:
        sys.stderr = before
        logging.getLogger().removeHandler(handler)


class _Stderr(io.RawIOBase):
    """The bytes of ``sys.stderr``, which never block their writer."""

    def __init__(self, terminal: Writer) -> None:
        self._terminal = terminal

    def write(self, data: Any) -> int:
        self._terminal.put(bytes(data))
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return os.isatty(2)


class _Handler(logging.Handler):
    """Writer of log records, from any thread: one line each, and the traceback of the first error of a kind."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._lines = CountedLines(warn)
        self._traced: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a message that cannot be formatted; or the loop is closed
            error, text = record.exc_info[1] if record.exc_info else None, _one_line(record.getMessage())
            if error is not None:
                text += f" ({type(error).__name__}: {_one_line(str(error))})"
            kind = f"{record.name} {str(record.msg).partition(chr(10))[0]} {type(error).__name__}"
            self._loop.call_soon_threadsafe(self._put, kind, f"{record.name}: {text}", error)

    def _put(self, kind: str, text: str, error: BaseException | None) -> None:
        if error is not None and kind not in self._traced and len(self._traced) < _MOST_TRACES:
            self._traced.add(kind)
            lines = traceback.format_exception(type(error), error, error.__traceback__, -_MOST_FRAMES)
            text = "".join([text, "\n", *lines])
        self._lines.put(kind, text)


def _one_line(text: str) -> str:
    return " ".join(text[:_LONGEST_TEXT].split())
