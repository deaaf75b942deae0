from __future__ import annotations

import asyncio
import asyncio.sslproto
import logging
import sys
import threading
from pathlib import Path

import pytest

import elasticstate.net.stream  # noqa: F401 - sets the buffer size
from elasticstate.compat import absent_names, standard_library
from elasticstate.loop_watch import watch_loops


def test_a_thread_gets_its_arguments() -> None:
    received: list[tuple[object, ...]] = []
    done = threading.Event()

    def note(*arguments: object) -> None:
        received.append(arguments)
        done.set()

    standard_library.start_thread(note, 1, "two")
    assert done.wait(10)
    assert received == [(1, "two")]


def test_event_loops_run_callbacks_by_the_runner() -> None:
    run = standard_library.callback_runner()
    assert run is not None
    seen: list[object] = []

    def watched(handle: asyncio.Handle) -> None:
        seen.append(standard_library.callback_of(handle))
        run(handle)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(print_nothing)
        await asyncio.sleep(0)

    def print_nothing() -> None:
        pass

    standard_library.set_callback_runner(watched)
    try:
        asyncio.run(main())
    finally:
        standard_library.set_callback_runner(run)
    assert print_nothing in seen


def test_tls_connections_have_a_buffer_of_a_set_size() -> None:
    size = getattr(asyncio.sslproto.SSLProtocol, "max_size", None)
    if sys.version_info >= (3, 11):
        assert size == 1 << 14, "net/stream.py has set it"
    standard_library.set_tls_buffer_bytes(size or 1 << 14)
    assert getattr(asyncio.sslproto.SSLProtocol, "max_size", None) == size


def test_without_the_runner_nothing_is_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    absent_names.warn_absent.cache_clear()
    monkeypatch.setattr(standard_library, "_RUN", "_renamed")
    with caplog.at_level(logging.WARNING, "elasticstate"), watch_loops(str(tmp_path / "slow")):
        pass
    absent_names.warn_absent.cache_clear()
    (record,) = caplog.records
    assert "so slow callbacks are not reported" in record.getMessage()
    assert not (tmp_path / "slow").exists()
