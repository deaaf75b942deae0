"""Tags of output lines, last lines for error reports, and log files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from elasticstate.agent.worker_output import Audience, Pump, Tagger
from elasticstate.writing import Writer


@pytest.mark.parametrize(
    ("chunks", "tagged"),
    [
        ([b"a\nb\n"], b"[t] a\n[t] b\n"),
        ([b"a", b"b\nc", b"\n"], b"[t] ab\n[t] c\n"),
        ([b"10%\r20%\r", b"done\r\n"], b"[t] 10%\r[t] 20%\r[t] done\r\n"),
        ([b"\n\n"], b"[t] \n[t] \n"),
        ([b"no end"], b"[t] no end\n"),
        ([b""], b""),
    ],
)
def test_each_line_has_its_tag_however_it_was_cut(chunks: list[bytes], tagged: bytes) -> None:
    tagger = Tagger(b"[t] ")
    assert b"".join(map(tagger.feed, chunks)) + tagger.end() == tagged


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    tagger = Tagger(b"[t] ")
    assert tagger.feed(b"x" * 70_000) == b"[t] " + b"x" * 70_000 + b"\n"


EVERYBODY = Audience(())


def pumped(
    data: bytes,
    tag: str,
    log: Path | None,
    audience: Audience | None = EVERYBODY,
    rank: int | None = None,
    late: bool = False,
) -> tuple[bytes, Pump]:
    """Return the bytes that reach the terminal through real pipes, and the pump.

    ``rank``: assigned to the worker after its first line, or with ``late`` after some of that line has been shown.
    """

    async def run() -> tuple[bytes, Pump]:
        reader, writer = os.pipe()
        source, sink = os.pipe()
        for pipe in (writer, sink):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        terminal = Writer(writer)
        pump = Pump(
            terminal,
            tag,
            Writer(lambda: os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)) if log else None,
            audience,
        )
        running = asyncio.ensure_future(pump.run(os.fdopen(source, "rb", buffering=0)))
        first, line_end, rest = data.partition(b"\n")
        os.write(sink, first + line_end)
        while rank is not None and not (select.select([reader], [], [], 0)[0] if late else pump.last_lines):
            await asyncio.sleep(0.001)
        if audience is not None and rank is not None:
            audience.rank = rank
        os.write(sink, rest)
        os.close(sink)
        await running
        terminal.close()
        os.close(writer)
        with os.fdopen(reader, "rb") as end:
            return end.read(), pump

    return asyncio.run(run())


def test_the_log_is_appended_without_tags(tmp_path: Path) -> None:
    log = tmp_path / "h-0.out"
    log.write_bytes(b"earlier\n")
    shown, _ = pumped(b"now\nno end", "[h:0] ", log)
    assert shown == b"[h:0] now\n[h:0] no end\n"
    assert log.read_bytes() == b"earlier\nnow\nno end"


def test_a_prompt_is_shown_although_it_has_no_end_and_a_line_in_pieces_is_shown_whole() -> None:
    async def run() -> list[bytes]:
        reader, writer = os.pipe()
        source, sink = os.pipe()
        terminal = Writer(writer)
        running = asyncio.ensure_future(
            Pump(terminal, "", None, EVERYBODY, has_prompts=True).run(os.fdopen(source, "rb", buffering=0))
        )
        shown = []
        for pieces in ((b"rank", b" ", b"1", b"\n"), (b"name? ",)):
            for piece in pieces:  # without a pause: the pump reads them one by one
                os.write(sink, piece)
                await asyncio.sleep(0)
            while not select.select([reader], [], [], 0)[0]:
                await asyncio.sleep(0.001)
            shown.append(os.read(reader, 100))
        os.close(sink)
        await running
        shown.append(os.read(reader, 100))
        terminal.close()
        for pipe in (reader, writer):
            os.close(pipe)
        return shown

    assert asyncio.run(run()) == [b"rank 1\n", b"name? ", b"\n"], "what follows the worker begins on a line of its own"


def test_the_last_lines_are_kept() -> None:
    _, pump = pumped(b"".join(b"%d\n" % n for n in range(1000)), "", None)
    assert pump.last_lines.split("\n") == [str(n) for n in range(980, 1000)]


def test_the_report_of_a_fatal_error_is_kept_from_its_first_line_on() -> None:
    program = "import ctypes, faulthandler\nfaulthandler.enable()\n"
    program += "def down(n): return down(n - 1) if n else ctypes.string_at(0)\ndown(50)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    _, pump = pumped(b"before\n" * 10 + done.stderr, "", None)
    assert pump.last_lines == done.stderr.decode().rstrip("\n")
    assert pump.last_lines.startswith("Fatal Python error: Segmentation fault")
    assert pump.last_lines.count("in down") == 51


@pytest.mark.parametrize(("rank", "shown"), [(0, b"boots\nsteps\n"), (1, b""), (5, b"boots\nsteps\n"), (7, b"")])
def test_what_is_printed_without_a_rank_is_shown_if_the_rank_is_one_that_was_asked_for(
    rank: int, shown: bytes, tmp_path: Path
) -> None:
    log = tmp_path / "h-0.out"
    assert pumped(b"boots\nsteps\n", "", log, Audience(((0, 0), (4, 6))), rank)[0] == shown
    assert log.read_bytes() == b"boots\nsteps\n", "files get all"


def test_a_command_that_never_has_a_rank_is_shown_in_the_end() -> None:
    assert pumped(b"one\nno end", "[h:0] ", None, Audience(((3, 3),)))[0] == b"[h:0] one\n[h:0] no end\n"


def test_what_has_no_rank_is_not_kept_back_for_ever() -> None:
    """Long output is shown before the rank is known. The rank then hides the rest."""
    much = b"x" * 69_999 + b"\n"
    shown, _ = pumped(much + b"rest\n", "", None, Audience(((3, 3),)), rank=1, late=True)
    assert shown in (much, much + b"rest\n")


def test_a_stream_that_nobody_asked_for_goes_to_its_file_alone(tmp_path: Path) -> None:
    log = tmp_path / "h-0.out"
    shown, pump = pumped(b"one\ntwo", "", log, None)
    assert shown == b""
    assert log.read_bytes() == b"one\ntwo"
    assert pump.last_lines == "one\ntwo"
