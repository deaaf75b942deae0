"""Output of workers: tagged line by line, passed on to the terminal, and kept in files."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import IO

from elasticstate.core.ids import WorkerId
from elasticstate.net.messages import OutputTail, OutputTrouble
from elasticstate.options import Options
from elasticstate.processes import reading, reads_stdin
from elasticstate.terminal import message
from elasticstate.writing import BLOCKED_S, Watch, Writer

_LONGEST_LINE_BYTES = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_TAIL_LINES = 20
_FATAL = "Fatal Python error: "  # the report of faulthandler begins with it, and has the innermost call first
_TRACKER = "resource_tracker: There appear to be"  # it removes what a killed process has left, and warns of it
_MOMENT_S = 0.2  # a worker that waits longer for its output is reported; the end of a worker waits no longer for output
_PROMPT_S = 0.02  # an incomplete line that nothing has followed for so long is a prompt
_SHOWN_LINES = 100  # of each stream, in the dashboard
_SHOWN_CHARACTERS = 16 * 1024  # likewise
_ENDS = ("out", "err")  # suffixes of log files


class Tagger:
    """Puts a tag before each line. An incomplete line is kept back."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._rest = b""
        self.shown = b""  # last, behind the end of a line

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete by now."""
        lines = (self._rest + data).splitlines(keepends=True)  # a progress bar ends its lines with a carriage return
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        self.shown = b"" if lines else self.shown
        lines = [self._tag + line for line in lines]
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self.end())
        return b"".join(lines)

    def end(self) -> bytes:
        """Return the rest of the last line, if it is incomplete, with an end."""
        rest = self.prompt()
        is_open, self.shown = bool(self.shown), b""
        return self._tag + rest + b"\n" if is_open else b""

    def prompt(self) -> bytes:
        """Return what is kept back, as it is."""
        rest, self._rest = self._rest, b""
        self.shown = rest or self.shown
        return rest


class Audience:
    """Decides by ``--only-ranks`` if the terminal shows a worker. Output before it has a rank is kept back."""

    def __init__(self, ranks: Sequence[tuple[int, int]]) -> None:
        """``ranks``: ranges of the ranks to show, both ends included. Empty: all ranks."""
        self._ranks = ranks
        self.rank: int | None = None

    def shows(self) -> bool | None:
        """Return True if the terminal shows the worker; None while the rank is not known yet."""
        if not self._ranks:
            return True
        if self.rank is None:
            return None
        return any(first <= self.rank <= last for first, last in self._ranks)


class Pump:
    """Carries one stream of one worker, until its end, to the log file and the terminal."""

    def __init__(
        self,
        terminal: Writer,
        tag: str,
        log: Writer | None,
        audience: Audience | None,
        has_prompts: bool = False,
        beside_prompt: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """``audience`` None: the terminal shows nothing. ``has_prompts``: somebody types behind incomplete lines.

        ``beside_prompt`` makes lines fit for a terminal that may show a prompt of another worker.
        """
        self._terminal = terminal
        self._beside_prompt = beside_prompt
        self._has_prompts = has_prompts
        self._tagger = Tagger(tag.encode())
        self._log = log
        self._audience = audience
        self._kept_back = b""
        self._tail = b""
        self._waits_for: Writer | None = None
        self._waits_since = 0.0

    @property
    def last_lines(self) -> str:
        """The last lines that the stream has carried; the whole report of a fatal error if that is longer."""
        lines = (line for line in self._tail.decode(errors="replace").splitlines() if _TRACKER not in line)
        last = "\n".join(deque(lines, maxlen=_TAIL_LINES))
        _, fatal, report = self._tail.decode(errors="replace").rpartition(_FATAL)
        return fatal + "\n".join(report.splitlines()) if fatal and fatal not in last else last

    @property
    def prompt(self) -> bytes:
        """The incomplete line that the terminal shows."""
        return self._tagger.shown

    def lines(self, most: int) -> str:
        """Return up to ``most`` of the last lines that the stream has carried."""
        lines = deque(self._tail.decode(errors="replace").splitlines(), maxlen=most)
        return "\n".join(lines)

    async def run(self, pipe: IO[bytes]) -> None:
        """Carry data until the end of the pipe. When cancelled, output that was kept back is still written."""
        try:
            async with reading(pipe) as reader:
                while data := await self._read(reader):
                    self._tail = (self._tail + data)[-_LONGEST_LINE_BYTES:]
                    await self._carry(self._shown(self._tagger.feed(data)), data)
        finally:
            self._terminal.put(self._shown(self._tagger.end(), is_end=True))
            if self._log is not None:
                self._log.close()
        await self._terminal.flushed(_MOMENT_S)
        if self._log is not None:
            await self._log.flushed(_MOMENT_S)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Read more. A prompt is shown when nothing follows it: print() writes each of its arguments by itself."""
        if self._has_prompts:
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(reader.read(_CHUNK_BYTES), _PROMPT_S)
            self._terminal.put(self._shown(self._tagger.prompt()))
        return await reader.read(_CHUNK_BYTES)

    async def _carry(self, shown: bytes, data: bytes) -> None:
        """Write data to log file and terminal. A worker waits for a slow log file.

        It waits for the terminal only if it has no log file.
        """
        self._waits_for, self._waits_since = self._log or self._terminal, time.monotonic()
        if self._log is None:
            await self._terminal.write(shown)
        else:
            self._terminal.put(shown)
            await self._log.write(data, BLOCKED_S)
        self._waits_for = None

    def waits_for(self, writers: Sequence[Writer]) -> bool:
        """Return True if the worker's output has waited for one of these writers for longer than a moment."""
        return self._waits_for in writers and time.monotonic() - self._waits_since > _MOMENT_S

    def _shown(self, lines: bytes, is_end: bool = False) -> bytes:
        """Return the lines for the terminal.

        A worker that never gets a rank (a command without ``run``) is shown at its end, or once it has printed a lot.
        """
        shows = self._audience.shows() if self._audience is not None else False
        lines, self._kept_back = self._kept_back + lines, b""
        if shows is None and not is_end and len(lines) <= _LONGEST_LINE_BYTES:
            lines, self._kept_back = b"", lines
        return b"" if shows is False else self._beside_prompt(lines)


class Outputs:
    """All outputs of one agent: two terminals, and the log files of its workers."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._writers: dict[str, list[Writer]] = {"stdout": [Writer(1)], "stderr": [Writer(2)]}
        self._pumps: dict[WorkerId, tuple[Pump, Pump]] = {}
        self._reader: tuple[WorkerId, int] | None = None  # with its process id: somebody types what it asks for
        self._watch = Watch()

    def pumps(
        self, worker: WorkerId, options: Options, audience: Audience, is_interactive: bool = False
    ) -> tuple[Pump, Pump]:
        """Create the pumps for stdout and stderr of a new worker.

        ``is_interactive``: a person types answers to what the worker prints, so all of it is shown, and at once.
        """
        tag = "" if is_interactive else f"[{worker.slot_id}] "
        if is_interactive:
            audience = Audience(())
        logs = self._open_logs(worker, options.log_dir)
        (stdout,), (stderr,) = self._writers["stdout"], self._writers["stderr"]
        how = is_interactive, bytes if is_interactive else self._beside_prompt
        self._pumps[worker] = (
            Pump(stdout, tag, logs[0], audience if options.tee & 1 or is_interactive else None, *how),
            Pump(stderr, tag, logs[1], audience if options.tee & 2 or is_interactive else None, *how),
        )
        return self._pumps[worker]

    def reads_keys(self, worker: WorkerId, pid: int) -> None:
        """Note that the process of an interactive worker has started."""
        self._reader = worker, pid

    def _beside_prompt(self, lines: bytes) -> bytes:
        """Return lines that leave the prompt of a worker that waits for keys at the end, on a line of its own."""
        if not lines or self._reader is None or not os.path.sameopenfile(1, 2):
            return lines
        worker, pid = self._reader
        prompt = next((pump.prompt for pump in self._pumps.get(worker, ()) if pump.prompt), b"")
        return b"\n" + lines + prompt if prompt and reads_stdin(pid) else lines

    def _open_logs(self, worker: WorkerId, directory: str | None) -> tuple[Writer | None, Writer | None]:
        """Open the log files of a slot, for appending. A line in each marks where a new process begins."""
        if directory is None:
            return None, None
        out, err = (Writer(partial(_open, Path(directory, f"{worker.host}-{worker.slot}.{end}"))) for end in _ENDS)
        begin = f"--- {worker} starts at {datetime.now(timezone.utc).isoformat(timespec='milliseconds')}\n".encode()
        out.put(begin)
        err.put(begin)
        self._writers.setdefault(f"--log-dir {directory}", []).extend((out, err))
        return out, err

    def ended(self, worker: WorkerId) -> None:
        """Forget a worker whose output is complete."""
        self._pumps.pop(worker, None)

    def tail(self, worker: WorkerId) -> OutputTail:
        """Return the last lines of a worker."""
        pumps = self._pumps.get(worker, ())
        stdout, stderr = (pump.lines(_SHOWN_LINES)[-_SHOWN_CHARACTERS:] for pump in pumps) if pumps else ("", "")
        return OutputTail(worker, stdout, stderr)

    def complain(self, text: str) -> None:
        """Write a line of the agent itself."""
        line = message(f"elasticstate: agent of {self._host}", text).encode(errors="replace")
        self._writers["stderr"][0].put(self._beside_prompt(line))

    def report_again(self) -> None:
        """Report each trouble that still lasts again, for a driver that may not have received it."""
        self._watch.forget()

    def changes(self) -> Iterator[OutputTrouble]:
        """Yield the outputs whose state has changed since the last call."""
        for name, writers in self._writers.items():
            waiting = (worker for worker, pumps in self._pumps.items() if any(p.waits_for(writers) for p in pumps))
            yield from self._watch.look(name, writers, waiting)

    async def flushed(self, timeout_s: float) -> None:
        """Wait until all data for the terminals is written, or cannot be written (see ``Writer.flushed``)."""
        for name in ("stdout", "stderr"):
            await self._writers[name][0].flushed(timeout_s)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
