"""Tags, tails and logs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from elasticstate.agent.output import Pump, Tagger, Terminal


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


def test_without_a_tag_bytes_pass_as_they_are() -> None:
    tagger = Tagger(b"")
    assert tagger.feed(b"no end") == b"no end"
    assert tagger.end() == b""


def pumped(data: bytes, tag: str, log: Path | None) -> tuple[bytes, Pump]:
    """What arrives at the terminal, through real pipes."""

    async def run() -> tuple[bytes, Pump]:
        reader, writer = os.pipe()
        source, sink = os.pipe()
        terminal = Terminal(writer)
        pump = Pump(terminal, tag, open(log, "ab", buffering=0) if log else None)  # noqa: SIM115
        running = asyncio.ensure_future(pump.run(os.fdopen(source, "rb", buffering=0)))
        os.write(sink, data)
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


def test_the_last_lines_are_kept() -> None:
    _, pump = pumped(b"".join(b"%d\n" % n for n in range(1000)), "", None)
    assert pump.last_lines.split("\n") == [str(n) for n in range(980, 1000)]
