"""What workers print: tagged line by line, passed on to the terminal, and kept in files."""

from __future__ import annotations

import asyncio
import os
from collections import deque
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


class Pump:
    """Carries one stream of one worker until its end."""

    def __init__(self, terminal: Terminal, tag: str, log: BinaryIO | None) -> None:
        self._terminal = terminal
        self._tagger = Tagger(tag.encode())
        self._log = log
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
                await self._terminal.write(self._tagger.feed(data), self._log, data)
        finally:
            transport.close()
            await self._terminal.write(self._tagger.end(), None, b"")
            if self._log is not None:
                self._log.close()
