"""A driver that is watched: its CPU time, an open page of its dashboard, scrapes of its metrics."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

SCRAPE_INTERVAL_S = 5.0


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond: its clock (clock_getcpuclockid)."""
    return time.clock_gettime(~pid << 3 | 2)


def scrape(port: int) -> int:
    """Read the metrics. Return their size."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return len(answer.read())


@contextmanager
def page(port: int) -> Iterator[list[int]]:
    """Read the events of the dashboard, as an open page does. Yield the sizes of the whole view, which has come, and of
    the changes."""
    sizes: list[int] = []
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as lines:
        connection.sendall(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert lines.readline().split()[1] == b"200"
        sizes.append(next(len(line) for line in lines if line.startswith(b"data: ")))

        def read() -> None:
            sizes.extend(len(line) for line in lines if line.startswith(b"data: "))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield sizes
        finally:
            connection.shutdown(socket.SHUT_RDWR)
            reader.join()


@contextmanager
def watched(page_port: int, metrics_port: int) -> Iterator[None]:
    """Keep a page open, and scrape now and every SCRAPE_INTERVAL_S."""
    is_over = threading.Event()

    def scrape_regularly() -> None:
        scrape(metrics_port)
        while not is_over.wait(SCRAPE_INTERVAL_S):
            scrape(metrics_port)

    with page(page_port) as sizes:
        scraping = threading.Thread(target=scrape_regularly)
        scraping.start()
        try:
            yield
        finally:
            is_over.set()
            scraping.join()
    assert len(sizes) > 1, "the page got no changes"
