"""Messages of libraries in the driver, while nobody reads its stderr."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time

from elasticstate.driver.output import CountedLines, captured
from elasticstate.writing import Writer

WRITES = 3000


def test_no_message_of_a_library_blocks_and_each_kind_has_few_lines() -> None:
    reading, writing = os.pipe()
    terminal, warned, before = Writer(writing), list[str](), sys.stderr

    async def run() -> float:
        begin = time.monotonic()
        with captured(terminal, warned.append):
            for number in range(WRITES):
                sys.stderr.write("x" * 500 + "\n")
                sys.stderr.buffer.write(b"x" * 500 + b"\n")
                logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %d", number)
                try:
                    raise ValueError(f"a text of\nthe peer: {number}")
                except ValueError:
                    logging.getLogger("aiohttp.server").exception("Error handling request from %s", number)
            thread = threading.Thread(target=lambda: print("x" * 1000, file=sys.stderr))
            thread.start()
            thread.join()
            await asyncio.sleep(0)
        return time.monotonic() - begin

    assert asyncio.run(run()) < 30
    assert sys.stderr is before
    assert not [handler for handler in logging.getLogger().handlers if "library_output" in type(handler).__module__]
    assert terminal.dropped_bytes > 1_000_000
    assert 10 < len(warned) < 50
    assert warned[0] == "asyncio: Task exception was never retrieved future: 0"
    assert warned[1].startswith("aiohttp.server: Error handling request from 0 (ValueError: a text of the peer: 0)\n")
    assert "Traceback" in warned[1]
    assert not [line for line in warned[2:] if "Traceback" in line]
    assert warned[-1].endswith("(2048 times so far)")
    terminal.close()
    os.close(reading)
    os.close(writing)


def test_kinds_beyond_a_number_count_together() -> None:
    lines = list[str]()
    counted = CountedLines(lines.append)
    for number in range(10_000):
        counted.refused("a", f"reason {number}")
    assert len(lines) < 60
