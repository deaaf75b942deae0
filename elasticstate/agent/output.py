"""What workers print: tagged line by line, passed on to the terminal, and kept in files."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, BinaryIO

_LONGEST_LINE_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_TAIL_LINES = 20


class Terminal:
    """Writes to a descriptor from a thread of its own: a terminal that nobody reads must not stop the agent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"elasticstate-output-{fd}")

    async def write(self, data: bytes, log: BinaryIO | None, raw: bytes) -> None:
        """Write ``data`` here and ``raw`` to the log; returns when that is done, so that a fast worker has to wait."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, data, log, raw)

    def close(self) -> None:
        """The thread ends when what it writes is written."""
        self._thread.shutdown(wait=False)

    def _write(self, data: bytes, log: BinaryIO | None, raw: bytes) -> None:
        if log is not None:
            log.write(raw)
        with suppress(OSError):  # the terminal is gone: the job goes on
            while data:
                data = data[os.write(self._fd, data) :]


class Tagger:
    """Puts a tag before each line. What has no end yet is kept back."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete by now."""
        if not self._tag:
            return data
        lines = (self._rest + data).splitlines(keepends=True)  # a progress bar ends its lines with a carriage return
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        lines = [self._tag + line for line in lines]
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self.end())
        return b"".join(lines)

    def end(self) -> bytes:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return self._tag + rest + b"\n" if rest else b""


class Audience:
    """Whether the terminal shows a worker: ``--only-ranks``. What it prints before it has a rank is kept back."""

    def __init__(self, ranks: Sequence[tuple[int, int]]) -> None:
        """``ranks``: ranges of those shown, both ends included; none: all."""
        self._ranks = ranks
        self.rank: int | None = None

    def shows(self) -> bool | None:
        """None: not known yet."""
        if not self._ranks:
            return True
        if self.rank is None:
            return None
        return any(first <= self.rank <= last for first, last in self._ranks)


class Pump:
    """Carries one stream of one worker until its end, to its file and to those who see it."""

    def __init__(self, terminal: Terminal, tag: str, log: BinaryIO | None, audience: Audience | None) -> None:
        """``audience`` None: nobody."""
        self._terminal = terminal
        self._tagger = Tagger(tag.encode())
        self._log = log
        self._audience = audience
        self._kept_back = b""
        self._tail = b""

    @property
    def last_lines(self) -> str:
        """The last lines that the stream has carried."""
        lines = deque(self._tail.decode(errors="replace").splitlines(), maxlen=_TAIL_LINES)
        return "\n".join(lines)

    async def run(self, pipe: IO[bytes]) -> None:
        """Returns at the end of the pipe; when cancelled, what was kept back is not lost."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while data := await reader.read(_CHUNK_BYTES):
                self._tail = (self._tail + data)[-_LONGEST_LINE_BYTES:]
                await self._terminal.write(self._shown(self._tagger.feed(data)), self._log, data)
        finally:
            transport.close()
            await self._terminal.write(self._shown(self._tagger.end(), is_end=True), None, b"")
            if self._log is not None:
                self._log.close()

    def _shown(self, lines: bytes, is_end: bool = False) -> bytes:
        """What the terminal gets now. A worker that never has a rank (a command without ``run``) is shown in the end,
        or once it has printed a lot."""
        shows = self._audience.shows() if self._audience is not None else False
        lines, self._kept_back = self._kept_back + lines, b""
        if shows is None and not is_end and len(lines) <= _LONGEST_LINE_BYTES:
            lines, self._kept_back = b"", lines
        return b"" if shows is False else lines
