"""Ports of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closed_port(host: str = "127.0.0.1") -> Iterator[tuple[int, socket.socket]]:
    """Yield a port that refuses connections, and its socket, which may listen later.

    The socket is bound and does not listen: so no other process gets the port meanwhile, as it might if it were free.
    """
    with socket.socket() as bound:
        bound.bind((host, 0))
        yield bound.getsockname()[1], bound
