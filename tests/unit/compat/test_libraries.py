from __future__ import annotations

import asyncio
import asyncio.sslproto
import sys
import threading

import elasticstate.net.control  # noqa: F401 - sets the buffer size
from elasticstate.compat import libraries


def test_a_thread_gets_its_arguments() -> None:
    received: list[tuple[object, ...]] = []
    done = threading.Event()

    def note(*arguments: object) -> None:
        received.append(arguments)
        done.set()

    libraries.start_thread(note, 1, "two")
    assert done.wait(10)
    assert received == [(1, "two")]


def test_tls_connections_have_a_buffer_of_a_set_size() -> None:
    size = getattr(asyncio.sslproto.SSLProtocol, "max_size", None)
    if sys.version_info >= (3, 11):
        assert size == 1 << 14, "net/control.py has set it"
    libraries.set_tls_buffer_bytes(size or 1 << 14)
    assert getattr(asyncio.sslproto.SSLProtocol, "max_size", None) == size
