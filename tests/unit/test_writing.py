"""Output that fails, blocks or is written in part, with real files, pipes and descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticstate.writing import BLOCKED_S, Writer

LIMIT = 1 << 16


@pytest.fixture
def writer() -> Iterator[Callable[..., Writer]]:
    """Writers that end with the test."""
    made = []

    def make(target: int | Callable[[], int]) -> Writer:
        made.append(Writer(target, LIMIT))
        return made[-1]

    yield make
    for one in made:
        one.close()
        until(lambda one=one: one.is_over, "the end of its thread")  # type: ignore[misc]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"has not come: {what}"
        time.sleep(0.002)


def test_a_file_that_cannot_be_written_is_written_as_soon_as_it_can(
    tmp_path: Path, writer: Callable[..., Writer]
) -> None:
    path = tmp_path / "absent" / "file"
    output = writer(lambda: os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    lines = [b"%0999d\n" % number for number in range(100)]
    for line in lines:
        output.put(line)
    until(lambda: output.trouble() == os.strerror(errno.ENOENT), "an error")
    assert output.dropped_bytes == 1000 * (100 - LIMIT // 1000)
    path.parent.mkdir()
    asyncio.run(asyncio.wait_for(flushed_in_the_end(output), 30))
    assert path.read_bytes() == b"".join(lines[: LIMIT // 1000]), "what was kept, in its order"
    output.put(b"later\n")
    until(lambda: path.read_bytes().endswith(b"later\n"), "what is put later")
    until(lambda: output.trouble() == "", "the end of the trouble")


async def flushed_in_the_end(output: Writer) -> None:
    """Wait for the output in spite of its errors, for which ``flushed`` does not wait."""
    while output.trouble() not in ("", "read too slowly"):
        await asyncio.sleep(0.01)
    await output.flushed()


def test_a_pipe_that_is_not_read_delays_nobody_and_loses_nothing_that_fits(writer: Callable[..., Writer]) -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    while select.select([], [sink], [], 0)[1]:
        os.write(sink, b"." * 4096)
    os.set_blocking(sink, True)
    output = writer(sink)
    began = time.monotonic()
    output.put(b"kept\n")
    output.put(b"x" * LIMIT)
    assert time.monotonic() - began < BLOCKED_S
    assert output.dropped_bytes == LIMIT
    until(lambda: output.trouble() == "not read", "a trouble")
    with os.fdopen(source, "rb") as pipe:
        until(lambda: pipe.readline().endswith(b"kept\n"), "what was kept")
        asyncio.run(output.flushed())
        until(lambda: output.trouble() == "", "the end of the trouble")
        output.put(b"later\n")
        assert pipe.readline() == b"later\n"
    os.close(sink)


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing(writer: Callable[..., Writer]) -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    output = writer(sink)

    async def run() -> None:
        for _ in range(20):
            await output.write(b"x" * 9_999 + b"\n")

    async def read() -> int:
        found = 0
        while found < 200_000:
            found += len(await asyncio.to_thread(os.read, source, 65536))
        return found

    async def both() -> int:
        return (await asyncio.gather(read(), run()))[0]

    assert asyncio.run(both()) == 200_000
    assert output.dropped_bytes == 0
    os.close(source)
    os.close(sink)


def test_a_caller_waits_for_room_and_not_longer_than_it_has_patience(writer: Callable[..., Writer]) -> None:
    source, sink = os.pipe()
    output = writer(sink)

    async def run() -> None:
        await output.write(b"x" * LIMIT)  # fits into the pipe
        await output.write(b"x" * LIMIT)
        waiting = asyncio.ensure_future(output.write(b"y" * LIMIT))
        await output.write(b"dropped", timeout_s=0.1)
        assert output.dropped_bytes == len(b"dropped")
        assert not waiting.done()
        found = b""
        while not found.endswith(b"y"):
            found += await asyncio.to_thread(os.read, source, 65536)
        await waiting
        assert found.count(b"x") == 2 * LIMIT

    asyncio.run(run())
    with os.fdopen(source, "rb") as pipe:
        asyncio.run(asyncio.wait_for(asyncio.to_thread(drain, output, pipe.fileno()), 30))
    os.close(sink)


def drain(output: Writer, source: int) -> None:
    while output._queue:
        if select.select([source], [], [], 0.01)[0]:
            os.read(source, 65536)


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)], ids=str)
def test_a_descriptor_that_is_closed_at_the_start_is_no_others_later(closed: tuple[int, ...], tmp_path: Path) -> None:
    script = f"""
import os, socket, sys
from elasticstate.terminal import hold_standard_descriptors
hold_standard_descriptors()
assert socket.socket().fileno() > 2
assert all(os.path.samestat(os.fstat(fd), os.stat("/dev/null")) for fd in {closed})
assert all(os.get_inheritable(fd) for fd in {closed})
print("lost", file=sys.stderr if sys.stderr.fileno() in {closed} else None, flush=True)
open({str(tmp_path / "done")!r}, "w").close()
"""
    closing = " ".join(f"{fd}>&-" for fd in closed)
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closing}', sys.executable, script], check=True, timeout=60)
    assert (tmp_path / "done").exists()
